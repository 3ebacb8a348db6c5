package collective

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

// childEnv makes the test binary run rank 1 of a world of two, whose rank 0 listens at the address in it.
const childEnv = "BATON_COLLECTIVE_CHILD"

// child adds matrices with rank 0 until it is stopped.
func child(addr string) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	ws, err := Join(ctx, MeshConfig{Size: 2, Local: []int{1}, Listener: ln, Peers: []string{addr}, Secret: []byte("s")})
	if err != nil {
		panic(err)
	}
	g, err := ws[0].Group("all", []int{0, 1})
	for i := 0; err == nil; i++ {
		if i == 100 {
			fmt.Println("going")
		}
		err = g.AllReduce(square(64))
	}
	fmt.Println(err)
}

// TestProcessDies kills and stops a real process in the middle of operations.
func TestProcessDies(t *testing.T) {
	for name, c := range map[string]struct {
		signal  syscall.Signal
		says    string
		silence time.Duration
		within  time.Duration
	}{
		"killed":  {syscall.SIGKILL, "connection", patience, 0},
		"stopped": {syscall.SIGSTOP, "nothing heard for 1s", time.Second, time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ln := listen(t)
			cmd := exec.Command(os.Args[0], "-test.run=^$")
			cmd.Env = append(os.Environ(), childEnv+"="+ln.Addr().String())
			cmd.Stderr = os.Stderr
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			defer cmd.Wait()
			defer cmd.Process.Kill()
			r := <-join(within(t, patience), MeshConfig{Size: 2, Local: []int{0}, Listener: ln, Secret: []byte("s"), Silence: c.silence})
			if r.err != nil {
				t.Fatal(r.err)
			}
			defer shut(t, r.ws)
			ended := make(chan error, 1)
			go func() {
				g, err := r.ws[0].Group("all", []int{0, 1})
				for err == nil {
					err = g.AllReduce(square(64))
				}
				ended <- err
			}()
			if line, err := bufio.NewReader(out).ReadString('\n'); line != "going\n" {
				t.Fatalf("the other process says %q, %v", line, err)
			}
			if err := cmd.Process.Signal(c.signal); err != nil {
				t.Fatal(err)
			}
			start := time.Now()
			err = <-ended
			took := time.Since(start)
			var lost *LostError
			if !errors.As(err, &lost) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got error %v; want one that says %q", err, c.says)
			}
			if slack := time.Second; took > c.within+slack {
				t.Errorf("it took %v", took)
			}
			if c.signal == syscall.SIGSTOP { // it learns that it has been given up
				if err := cmd.Process.Signal(syscall.SIGCONT); err != nil {
					t.Fatal(err)
				}
				rest, err := io.ReadAll(out)
				if !strings.Contains(string(rest), "failed") {
					t.Errorf("the process that was stopped says %q, %v", rest, err)
				}
			}
		})
	}
}
