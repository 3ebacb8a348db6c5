package backend

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"baton/transfer"
)

// Task is the transfer.Handle of every backend: whoever runs the transfer settles it.
type Task struct {
	ctx     context.Context
	cancel  context.CancelCauseFunc
	forget  func() bool // the endpoint's life
	settled chan struct{}
	moved   atomic.Int64

	mu sync.Mutex
	st transfer.Status
}

// NewTask returns a running task whose context ends with ctx, with the endpoint's life, or with Cancel.
func NewTask(ctx, life context.Context) *Task {
	ctx, cancel := context.WithCancelCause(ctx)
	return &Task{
		ctx: ctx, cancel: cancel, settled: make(chan struct{}),
		forget: context.AfterFunc(life, func() { cancel(transfer.ErrClosed) }),
		st:     transfer.Status{State: transfer.Running, Began: time.Now()},
	}
}

// Context ends when the transfer should; it is cancelled too once the task has settled for good.
func (t *Task) Context() context.Context { return t.ctx }

// Moved adds to the bytes that Poll reports.
func (t *Task) Moved(n int64) { t.moved.Add(n) }

// Settle records the outcome, Done if err is nil, else Failed. The first one stands.
func (t *Task) Settle(err error) {
	state := transfer.Done
	if err != nil {
		state = transfer.Failed
	}
	t.settle(state, err)
}

// Distrust records that the transfer failed while bytes may still arrive; Settle follows.
func (t *Task) Distrust(err error) { t.settle(transfer.Unsafe, err) }

func (t *Task) settle(state transfer.State, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	was := t.st.State
	if was == transfer.Done || was == transfer.Failed || was == state {
		return
	}
	t.st.State, t.st.Ended = state, time.Now()
	if t.st.Err == nil || state == transfer.Done {
		t.st.Err = err
	}
	if was == transfer.Running {
		close(t.settled)
	}
	if state != transfer.Unsafe {
		t.forget()
		t.cancel(nil)
	}
}

// Poll never blocks.
func (t *Task) Poll() transfer.Status {
	t.mu.Lock()
	defer t.mu.Unlock()
	st := t.st
	st.Bytes = t.moved.Load()
	return st
}

// Settled is closed at the first of Done, Failed, Unsafe.
func (t *Task) Settled() <-chan struct{} { return t.settled }

// Cancel asks the transfer to stop.
func (t *Task) Cancel() { t.cancel(context.Canceled) }

// Reason is why a transfer under ctx failed with err: the end of ctx, if it has ended, for then err is
// only what that did to a connection.
func Reason(ctx context.Context, err error) error {
	if ctx.Err() == nil {
		return err
	}
	cause := context.Cause(ctx)
	if errors.Is(cause, context.DeadlineExceeded) {
		return fmt.Errorf("%w: %w", transfer.ErrTimeout, cause)
	}
	return cause
}
