package frontend

import (
	"context"

	"baton/coordinator"
	"baton/wire"
)

// Native is the Backend of a coordinator. The client stays its owner's to close.
type Native struct{ Client *coordinator.Client }

// Submit implements Backend.
func (n Native) Submit(ctx context.Context, req *wire.SubmitRequest) (Stream, error) {
	s, err := n.Client.Submit(ctx, req)
	if err != nil {
		return nil, err
	}
	return s, nil
}

// Status implements Backend.
func (n Native) Status(ctx context.Context) (*wire.StatusReply, error) { return n.Client.Status(ctx) }
