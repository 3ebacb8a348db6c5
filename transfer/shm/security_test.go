//go:build linux

package shm

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"baton/transfer"
	"baton/transfer/internal/backend"

	"golang.org/x/sys/unix"
)

// What a peer is passed cannot be written to, not even by opening it again.
func TestPeersCannotWrite(t *testing.T) {
	src, dst := open(t, 1<<16, Options{}), open(t, 1<<16, Options{})
	copy(src.mem.Data, "untouched")
	if err := src.Export(1, capability, []transfer.Range{{Len: 1 << 16}}); err != nil {
		t.Fatal(err)
	}
	h, err := dst.Pull(t.Context(), src.Describe(), 1, capability, []transfer.Copy{{Len: 1 << 16}})
	if err != nil {
		t.Fatal(err)
	}
	if <-h.Settled(); h.Poll().State != transfer.Done {
		t.Fatal(h.Poll().Err)
	}
	passed := int(src.ro.Fd())
	if _, err := unix.Mmap(passed, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
		t.Error("the passed descriptor was mapped for writing")
	}
	if _, err := unix.Pwrite(passed, []byte("x"), 0); err == nil {
		t.Error("the passed descriptor was written to")
	}
	again, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", passed), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if _, err := again.WriteAt([]byte("x"), 0); !errors.Is(err, unix.EPERM) {
		t.Errorf("writing after opening it again: %v", err)
	}
	if _, err := unix.Mmap(int(again.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != unix.EPERM {
		t.Errorf("mapping after opening it again: %v", err)
	}
	if err := again.Truncate(0); err == nil {
		t.Error("it was cut short")
	}
	if !bytes.HasPrefix(src.mem.Data, []byte("untouched")) {
		t.Error("the memory changed")
	}
}

const nobody = 65534

// asNobody runs f on a thread that belongs to another user.
func asNobody(t *testing.T, f func() error) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can act as another user")
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // for good: the thread ends with the goroutine
		// The raw call concerns this thread alone.
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, nobody, nobody, nobody); errno != 0 {
			done <- errno
			return
		}
		done <- f()
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// Another user's process gets nothing, even with a right capability.
func TestAnotherUserPulls(t *testing.T) {
	src := open(t, 1<<16, Options{})
	if err := src.Export(1, capability, []transfer.Range{{Len: 1 << 16}}); err != nil {
		t.Fatal(err)
	}
	request := binary.LittleEndian.AppendUint64([]byte(magic), src.id)
	start := len(request)
	request = binary.LittleEndian.AppendUint64(append(backend.BeginFrame(request), kindClaim), 1)
	request = backend.EndFrame(backend.AppendClaim(request, 1, capability), start)
	start = len(request)
	request = backend.EndFrame(backend.AppendRanges(backend.BeginFrame(request), []transfer.Range{{Len: 10}}), start)
	ask := func(got *int) error {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 5}); err != nil {
			return err
		}
		if err := unix.Connect(fd, &unix.SockaddrUnix{Name: src.server.Addr().String()}); err != nil {
			return err
		}
		_, _ = unix.Write(fd, request) // may fail: closed already
		var b, oob [1024]byte
		n, oobn, _, _, err := unix.Recvmsg(fd, b[:], oob[:], unix.MSG_CMSG_CLOEXEC)
		if msgs, err := unix.ParseSocketControlMessage(oob[:max(oobn, 0)]); err == nil {
			for i := range msgs {
				fds, _ := unix.ParseUnixRights(&msgs[i])
				for _, fd := range fds {
					unix.Close(fd)
				}
			}
		}
		*got = max(n, 0) + max(oobn, 0)
		if err == unix.ECONNRESET {
			err = nil
		}
		return err
	}
	var ours, theirs int
	if err := ask(&ours); err != nil || ours == 0 {
		t.Fatalf("this user got %d bytes: %v", ours, err)
	}
	asNobody(t, func() error { return ask(&theirs) })
	if theirs != 0 {
		t.Errorf("another user got %d bytes", theirs)
	}
}

// A source of another user is not believed.
func TestAnotherUserOffers(t *testing.T) {
	dst := open(t, 1<<16, Options{})
	const name = "@baton-test-impostor"
	fd := -1
	asNobody(t, func() (err error) {
		if fd, err = unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		if err := unix.Bind(fd, &unix.SockaddrUnix{Name: name}); err != nil {
			return err
		}
		return unix.Listen(fd, 1)
	})
	defer unix.Close(fd)
	peer := backend.Description{Backend: Name, Addr: name, Incarnation: 1, Size: 1 << 16}.Encode()
	h, err := dst.Pull(t.Context(), peer, 1, capability, []transfer.Copy{{Len: 10}})
	if err != nil {
		t.Fatal(err)
	}
	if <-h.Settled(); h.Poll().Err == nil || !strings.Contains(h.Poll().Err.Error(), "the peer runs as user 65534") {
		t.Errorf("got %+v", h.Poll())
	}
}

// A capability is void at its release, also for a peer that holds the memory already.
func TestReleasedCapability(t *testing.T) {
	src, dst := open(t, 1<<16, Options{}), open(t, 1<<16, Options{})
	pull := func() transfer.Status {
		h, err := dst.Pull(t.Context(), src.Describe(), 1, capability, []transfer.Copy{{Len: 100}})
		if err != nil {
			t.Fatal(err)
		}
		<-h.Settled()
		return h.Poll()
	}
	if err := src.Export(1, capability, []transfer.Range{{Len: 1 << 16}}); err != nil {
		t.Fatal(err)
	}
	if st := pull(); st.State != transfer.Done {
		t.Fatal(st.Err)
	}
	deadline := time.Now().Add(5 * time.Second)
	for !src.Revoke(1) { // the reader's word may be on its way
		if time.Now().After(deadline) {
			t.Fatal("a reader is left")
		}
		time.Sleep(time.Millisecond)
	}
	src.mem.Data[0] = 'x'
	if st := pull(); !errors.Is(st.Err, transfer.ErrRefused) || st.Bytes > 0 || dst.mem.Data[0] == 'x' {
		t.Errorf("got %+v", st)
	}
}

// Connections that end halfway, of whichever kind, leave nothing behind.
func TestHalfOpen(t *testing.T) {
	src := open(t, 4096, Options{Timeout: 100 * time.Millisecond})
	for i, say := range [][]byte{nil, []byte(magic), binary.LittleEndian.AppendUint64([]byte(magic), src.id), {0xff, 0xff, 0xff, 0xff}} {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Connect(fd, &unix.SockaddrUnix{Name: src.server.Addr().String()}); err != nil {
			t.Fatal(err)
		}
		if _, err := unix.Write(fd, say); err != nil {
			t.Fatal(err)
		}
		if err := unix.Shutdown(fd, unix.SHUT_WR); err != nil {
			t.Fatal(err)
		}
		f := os.NewFile(uintptr(fd), "stranger")
		if got, err := io.ReadAll(f); len(got) > 0 {
			t.Errorf("stranger %d got %x, %v", i, got, err)
		}
		f.Close()
	}
}
