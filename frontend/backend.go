package frontend

import (
	"context"

	"baton/coordinator"
	"baton/wire"
)

// Backend runs requests. It is safe for concurrent use.
type Backend interface {
	// Submit starts a request (its ID is the backend's to choose) and returns the stream of its results.
	// When ctx ends, so does the request. A refusal is a *RequestError.
	Submit(ctx context.Context, req *wire.SubmitRequest) (Stream, error)
	// Status says whether requests can be served now, and by which engines.
	Status(ctx context.Context) (*wire.StatusReply, error)
}

// Stream is the results of one request, in order. It is used by one goroutine.
type Stream interface {
	// Next waits for news, which the caller then owns: io.EOF after the result that carries Finish, a *RequestError when the request
	// failed, or ctx's error.
	Next(ctx context.Context) (wire.Result, error)
	// Close gives the request up if it still runs. It may be called again.
	Close()
}

// RequestError is how a backend reports that a request failed. Field is the JSON name of what is at fault.
type RequestError = coordinator.RequestError
