//go:build !linux

// Package shm is the transfer backend for engines on one host. It needs Linux.
package shm

import (
	"errors"
	"time"

	"baton/transfer"
)

// Name is the backend's name in flags and registrations.
const Name = "shm"

// Options tune an endpoint.
type Options struct {
	Threads int
	Timeout time.Duration
}

// New fails: this system has no memory descriptors to pass.
func New(*transfer.Memory, Options) (transfer.Puller, error) {
	return nil, &transfer.Error{Op: "shm open", Err: errors.New("only Linux has it: use --transfer tcp")}
}
