package transfer

import (
	"errors"
	"io"
	"os"
	"strings"
	"syscall"
	"testing"
)

func TestMemory(t *testing.T) {
	m, err := NewMemory(10_000, "pool\x00"+strings.Repeat("x", 500))
	if err != nil {
		t.Fatal(err)
	}
	if len(m.Data) != 10_000 || cap(m.Data) != 10_000 || len(m.mapped)%os.Getpagesize() != 0 {
		t.Errorf("%d bytes, capacity %d, mapped %d", len(m.Data), cap(m.Data), len(m.mapped))
	}
	m.Data[0], m.Data[9_999] = 1, 2
	if err := m.Touch(); err != nil {
		t.Error(err)
	}
	if m.Data[0] != 1 || m.Data[9_999] != 2 || m.Data[5000] != 0 {
		t.Error("Touch changed a byte")
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	if err := m.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}
}

func TestMemoryLimits(t *testing.T) {
	for _, size := range []int64{-1, 0, maxMemory + 1, 1<<63 - 1} {
		if m, err := NewMemory(size, "bad"); err == nil {
			m.Close()
			t.Errorf("%d bytes were granted", size)
		}
	}
}

// Other processes see the bytes through the descriptor, and cannot lose them.
func TestMemoryDescriptor(t *testing.T) {
	m, err := NewMemory(10_000, "pool")
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if m.FD < 0 {
		t.Skip("no descriptors on this system")
	}
	copy(m.Data[4000:], "hello")
	fd, err := syscall.Dup(m.FD)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "dup")
	defer f.Close()
	got := make([]byte, 5)
	if _, err := io.ReadFull(io.NewSectionReader(f, 4000, 5), got); err != nil || string(got) != "hello" {
		t.Errorf("got %q, %v", got, err)
	}
	if err := f.Truncate(0); !errors.Is(err, syscall.EPERM) {
		t.Errorf("the memory can shrink under its readers: %v", err)
	}
}

func TestErrors(t *testing.T) {
	err := error(&Error{Op: "tcp pull", Peer: "10.0.0.1:5", Err: ErrPeerLost})
	if !errors.Is(err, ErrPeerLost) || err.Error() != "tcp pull with 10.0.0.1:5: transfer: peer lost" {
		t.Errorf("got %q", err)
	}
}
