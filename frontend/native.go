package frontend

import (
	"context"
	"errors"

	"baton/coordinator"
	"baton/wire"
)

// Native is the Backend of a coordinator.
type Native struct{ Client *coordinator.Client }

// Submit implements Backend.
func (n Native) Submit(ctx context.Context, req *wire.SubmitRequest) (Stream, error) {
	s, err := n.Client.Submit(ctx, req)
	if err != nil {
		return nil, nativeError(err)
	}
	return nativeStream{s}, nil
}

// Status implements Backend.
func (n Native) Status(ctx context.Context) (*wire.StatusReply, error) {
	reply, err := n.Client.Status(ctx)
	return reply, nativeError(err)
}

type nativeStream struct{ *coordinator.Stream }

func (s nativeStream) Next(ctx context.Context) (wire.Result, error) {
	r, err := s.Stream.Next(ctx)
	return r, nativeError(err)
}

func nativeError(err error) error {
	if e, ok := errors.AsType[*coordinator.RequestError](err); ok {
		return &RequestError{Code: e.Code, Field: e.Field, Message: e.Message, Retryable: e.Retryable}
	}
	return err
}
