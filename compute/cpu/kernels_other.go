//go:build !amd64

package cpu

import "runtime"

func bestKernels() *kernels { return &portableKernels }

// pause gives way to another goroutine: there is no pause instruction to be had.
func pause(int) { runtime.Gosched() }
