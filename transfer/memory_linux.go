package transfer

import (
	"errors"
	"os"
	"strings"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

func mapMemory(size int64, name string) (*Memory, error) {
	page := int64(os.Getpagesize())
	whole := (size + page - 1) / page * page
	fd, err := unix.MemfdCreate(memfdName(name), unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	if err := unix.Ftruncate(fd, whole); err != nil {
		unix.Close(fd)
		return nil, os.NewSyscallError("ftruncate", err)
	}
	mapped, err := unix.Mmap(fd, 0, int(whole), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		unix.Close(fd)
		return nil, os.NewSyscallError("mmap", err)
	}
	if err := seal(fd); err != nil {
		unix.Munmap(mapped)
		unix.Close(fd)
		return nil, err
	}
	// Huge pages where the system grants them to shared memory; it is as well without.
	_ = unix.Madvise(mapped, unix.MADV_HUGEPAGE)
	return &Memory{Data: mapped[:size:size], FD: fd, mapped: mapped}, nil
}

// seal fixes the size, for readers in other processes rely on it: a page that vanished would kill them.
// And it makes the mapping that there is the last one that can write, so that a reader stays one.
func seal(fd int) error {
	const size = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
	_, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, size|unix.F_SEAL_FUTURE_WRITE)
	if err == unix.EINVAL { // a kernel before 5.1
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, size)
	}
	return os.NewSyscallError("fcntl(F_ADD_SEALS)", err)
}

// memfdName fits name to the kernel's rules.
func memfdName(name string) string {
	name = strings.ReplaceAll("baton-"+name, "\x00", "")
	return name[:min(len(name), 200)]
}

func (m *Memory) unmap(mapped []byte) error {
	fd := m.FD
	m.FD = -1
	return errors.Join(
		os.NewSyscallError("munmap", unix.Munmap(mapped)),
		os.NewSyscallError("close", unix.Close(fd)))
}

func touch(mapped []byte) error {
	err := unix.Madvise(mapped, unix.MADV_POPULATE_WRITE)
	if err != unix.EINVAL { // a kernel before 5.14
		return os.NewSyscallError("madvise(MADV_POPULATE_WRITE)", err)
	}
	for i := 0; i < len(mapped); i += os.Getpagesize() {
		atomic.AddUint32((*uint32)(unsafe.Pointer(&mapped[i])), 0)
	}
	return nil
}
