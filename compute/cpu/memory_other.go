//go:build !unix

package cpu

import "unsafe"

// mapMemory falls back to the Go heap, aligned for any element.
func mapMemory(n int) ([]byte, error) {
	words := make([]uint64, (n+7)/8)
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(words))), n), nil
}

func unmapMemory([]byte) error { return nil }
