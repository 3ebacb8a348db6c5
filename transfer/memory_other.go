//go:build unix && !linux

package transfer

import (
	"os"
	"syscall"
)

// mapMemory has no descriptor to share here, so the shm backend is not available.
func mapMemory(size int64, _ string) (*Memory, error) {
	page := int64(os.Getpagesize())
	mapped, err := syscall.Mmap(-1, 0, int((size+page-1)/page*page), syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	return &Memory{Data: mapped[:size:size], FD: -1, mapped: mapped}, nil
}

func (m *Memory) unmap(mapped []byte) error {
	return os.NewSyscallError("munmap", syscall.Munmap(mapped))
}

// touch leaves it to first use.
func touch([]byte) error { return nil }
