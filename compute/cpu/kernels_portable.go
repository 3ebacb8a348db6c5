package cpu

import "runtime"

func bestKernels() *kernels { return &portableKernels }

// pause gives way for a moment; where there is no pause instruction, to another goroutine.
func pause(int) { runtime.Gosched() }
