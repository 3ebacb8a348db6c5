package tensor

import (
	"math"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// mapFile maps a whole regular file read-only. The views that readers hand out point into it, so they
// die with unmap. Nothing can protect a process from a file that somebody shortens while it is mapped
// (the kernel raises SIGBUS): replace a model's file by renaming a new one over it.
func mapFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, osError(path, err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, osError(path, err)
	}
	switch size := info.Size(); {
	case !info.Mode().IsRegular():
		return nil, fileErrorf(ErrUnsupported, path, "", "is not a regular file")
	case size == 0:
		return nil, fileErrorf(ErrMalformed, path, "", "is empty")
	case size > math.MaxInt:
		return nil, fileErrorf(ErrUnsupported, path, "", "is too large to map")
	}
	data, err := syscall.Mmap(int(f.Fd()), 0, int(info.Size()), syscall.PROT_READ, syscall.MAP_SHARED)
	if err != nil {
		return nil, osError(path, os.NewSyscallError("mmap", err))
	}
	return data, nil
}

func osError(path string, err error) error {
	problem := err.Error()
	if pe, ok := err.(*os.PathError); ok { // the path is said already
		problem = pe.Op + ": " + pe.Err.Error()
	}
	return &FileError{Path: path, Problem: problem, Err: err}
}

func unmap(data []byte) error {
	if data == nil {
		return nil
	}
	return os.NewSyscallError("munmap", syscall.Munmap(data))
}

// forget gives the pages back in which data lies, if that is within one of the mappings: they come from the file
// again when they are read. What else lies in them fares alike.
func forget(maps [][]byte, data []byte) {
	if len(data) == 0 {
		return
	}
	at := uintptr(unsafe.Pointer(unsafe.SliceData(data)))
	for _, m := range maps {
		base := uintptr(unsafe.Pointer(unsafe.SliceData(m)))
		if at < base || at+uintptr(len(data)) > base+uintptr(len(m)) {
			continue
		}
		page := os.Getpagesize()
		from, to := int(at-base)/page*page, int(at-base)+len(data)
		_ = unix.Madvise(m[from:min((to+page-1)/page*page, len(m))], unix.MADV_DONTNEED) // it is advice
	}
}
