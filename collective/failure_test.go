package collective

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"baton/compute"
)

// square is a matrix for operations whose contents do not matter.
func square(n int) compute.Mat {
	return compute.Mat{Buf: make(heap, n*n), Rows: n, Cols: n, Stride: n}
}

func squares(count, n int) []compute.Mat {
	ms := make([]compute.Mat, count)
	for i := range ms {
		ms[i] = square(n)
	}
	return ms
}

// needy are operations of a group of four in which nobody but rank 3 can finish without rank 3, or in which at
// least one cannot.
var needy = map[string]func(g Group) error{
	"AllReduce": func(g Group) error { return g.AllReduce(square(4)) },
	"AllGatherRows": func(g Group) error {
		return g.AllGatherRows(compute.Mat{Buf: make(heap, 64), Rows: 16, Cols: 4, Stride: 4}, square(4))
	},
	"AllGatherColumns": func(g Group) error {
		return g.AllGatherColumns(compute.Mat{Buf: make(heap, 64), Rows: 4, Cols: 16, Stride: 16}, square(4))
	},
	"GatherColumns": func(g Group) error {
		return g.GatherColumns(0, compute.Mat{Buf: make(heap, 64), Rows: 4, Cols: 16, Stride: 16}, square(4))
	},
	"Broadcast": func(g Group) error { return g.Broadcast(3, square(4)) },
	"AllToAll":  func(g Group) error { return g.AllToAll(squares(4, 4), squares(4, 4)) },
	"Barrier":   func(g Group) error { return g.Barrier() },
	"Recv":      func(g Group) error { return g.Recv(3, square(4)) },
	"Send": func(g Group) error {
		for range queueDepth {
			if err := g.Send(3, square(4)); err != nil {
				return err
			}
		}
		return g.Send(3, square(4))
	},
}

var everybody = []int{0, 1, 2, 3}

// kinds are ways to run four ranks.
var kinds = map[string]func(testing.TB) []*World{
	"local":  func(testing.TB) []*World { return Local(4) },
	"halves": func(tb testing.TB) []*World { return mesh(tb, []int{0, 1}, []int{2, 3}) },
	"apart":  func(tb testing.TB) []*World { return mesh(tb, []int{0}, []int{1}, []int{2}, []int{3}) },
}

// mustFail wants rank's failure from every other rank's operation, and from every one after it.
func mustFail(t *testing.T, ws []*World, rank int, why string, f func(*World) error) {
	t.Helper()
	for i, err := range together(t, ws, f) {
		if i == rank {
			if err != nil {
				t.Error(err)
			}
			continue
		}
		var failed *FailedError
		if !errors.As(err, &failed) || failed.Rank != rank || !strings.Contains(err.Error(), why) {
			t.Errorf("rank %d: got error %v; want that rank %d failed: %s", i, err, rank, why)
		}
		if ws[i].Err() == nil {
			t.Errorf("rank %d: the world goes on", i)
		}
		if _, err := ws[i].Group("another", everybody); err == nil {
			t.Errorf("rank %d: a group after the end", i)
		}
	}
}

// TestFail ends operations of all kinds while all others wait in them.
func TestFail(t *testing.T) {
	for kind, start := range kinds {
		for name, call := range needy {
			t.Run(kind+"/"+name, func(t *testing.T) {
				t.Parallel()
				ws := start(t)
				mustFail(t, ws, 3, "smoke", func(w *World) error {
					g, err := w.Group("all", everybody)
					if err != nil {
						return err
					}
					if w.Rank() == 3 {
						err := awaitSleep(ws[:3])
						w.Fail(errors.New("smoke"))
						return errors.Join(err, w.Close())
					}
					for err == nil { // in some only one waits for rank 3; then the others for that one
						if err = call(g); err == nil {
							err = g.Barrier()
						}
					}
					return err
				})
				shut(t, ws)
			})
		}
	}
}

// TestFailLetsGoOfMemory fails a world at any moment of its operations. Whoever has learned of it may use its
// matrices for something else at once, which the race detector watches.
func TestFailLetsGoOfMemory(t *testing.T) {
	r := newRand(3)
	for range 300 {
		ws := Local(4)
		delay := time.Duration(r.IntN(100)) * time.Microsecond
		for i, err := range together(t, ws, func(w *World) error {
			g, err := w.Group("all", everybody)
			if err != nil {
				return err
			}
			if w.Rank() == 2 {
				time.AfterFunc(delay, func() { w.Fail(errors.New("smoke")) })
			}
			m := square(20)
			for err == nil {
				err = g.AllReduce(m)
			}
			clear(m.Buf.(heap))
			return err
		}) {
			if err == nil || !strings.Contains(err.Error(), "smoke") {
				t.Errorf("rank %d: %v", i, err)
			}
		}
		shut(t, ws)
	}
}

// awaitSleep waits until a rank has parked.
func awaitSleep(ws []*World) error {
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		for _, w := range ws {
			w.p.mu.Lock()
			kind := w.p.ranks[w.rank].wait.kind
			w.p.mu.Unlock()
			if kind != awake {
				return nil
			}
		}
	}
	return errors.New("nobody waits")
}

// TestCloseEndsWhoNeedsIt closes a rank that others wait for, but leaves alone those that do not.
func TestCloseEndsWhoNeedsIt(t *testing.T) {
	for kind, start := range kinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			ws := start(t)
			errs := together(t, ws, func(w *World) error {
				pair := []int{w.Rank() &^ 1, w.Rank() | 1}
				two, err := w.Group("pair", pair)
				if err != nil {
					return err
				}
				all, err := w.Group("all", everybody)
				if err != nil {
					return err
				}
				if err := all.Barrier(); err != nil {
					return err
				}
				if w.Rank() >= 2 {
					return w.Close()
				}
				for range 50 {
					if err := two.AllReduce(square(9)); err != nil {
						return err
					}
				}
				if err := all.Barrier(); !errors.Is(err, ErrClosed) && !strings.Contains(fmt.Sprint(err), ErrClosed.Error()) {
					return fmt.Errorf("a barrier with closed members: %v", err)
				}
				return nil
			})
			if err := errors.Join(errs...); err != nil {
				t.Error(err)
			}
			shut(t, ws)
			if _, err := ws[3].Group("late", everybody); err == nil {
				t.Error("a group after Close")
			}
		})
	}
}

// TestCloseAfterTheLastOperation lets every rank close as soon as it is done: nobody must be disturbed.
func TestCloseAfterTheLastOperation(t *testing.T) {
	for kind, start := range kinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			quickest := time.Hour
			for range 10 {
				ws := start(t)
				begin := time.Now()
				for i, err := range together(t, ws, func(w *World) error {
					g, err := w.Group("all", everybody)
					for range 3 {
						if err == nil {
							err = g.AllReduce(square(50))
						}
					}
					if err == nil {
						err = g.Barrier()
					}
					return errors.Join(err, w.Close())
				}) {
					if err != nil {
						t.Errorf("rank %d: %v", i, err)
					}
				}
				quickest = min(quickest, time.Since(begin))
			}
			if quickest > lastWords/2 {
				t.Errorf("even the quickest end took %v: nobody tells the others that it ends its connections", quickest)
			}
		})
	}
}

// TestMismatch has members call what does not fit together.
func TestMismatch(t *testing.T) {
	wide := compute.Mat{Buf: make(heap, 64), Rows: 4, Cols: 16, Stride: 16}
	for name, c := range map[string]struct {
		odd, rest func(Group) error
		says      []string // alternatives
	}{
		"operation": {needy["Barrier"], needy["AllReduce"], []string{`calls Barrier \(operation 0\)`}},
		"shape": {
			func(g Group) error { return g.AllReduce(square(5)) }, needy["AllReduce"], []string{"[5, 5]"},
		},
		"root": {
			func(g Group) error { return g.GatherColumns(1, wide, square(4)) }, needy["GatherColumns"], []string{"root 1"},
		},
		"broadcast root": {
			func(g Group) error { return g.Broadcast(2, square(4)) },
			func(g Group) error { return g.Broadcast(0, square(4)) }, []string{"do not fit together"},
		},
		"rows of a gather": {
			func(g Group) error {
				return g.AllGatherColumns(wide, compute.Mat{Buf: make(heap, 64), Rows: 3, Cols: 4, Stride: 4})
			},
			needy["AllGatherColumns"], []string{"[3, 4]"},
		},
		"room for a gather": {
			func(g Group) error { return g.AllGatherColumns(square(5), square(4)) }, needy["AllGatherColumns"], []string{"[5, 5]"},
		},
		"all to all": {
			func(g Group) error { return g.AllToAll(squares(4, 3), squares(4, 3)) }, needy["AllToAll"], []string{"[3, 3]"},
		},
		"message": {
			func(g Group) error { return g.Send(0, square(3)) }, func(g Group) error { return g.Recv(3, square(4)) }, []string{"[3, 3]", "waits"},
		},
		"receives instead": {
			func(g Group) error { return g.Recv(0, square(4)) }, needy["AllReduce"], []string{"rank 3 waits for message 0 from rank 0"},
		},
		"all receive": {
			func(g Group) error { return g.Recv(0, square(4)) },
			func(g Group) error { return g.Recv(g.Rank()+1, square(4)) }, []string{"rank 3 waits for message 0 from rank 0"},
		},
		"one lags behind": {
			func(g Group) error { return errors.Join(g.AllReduce(square(4)), g.Recv(2, square(4))) },
			func(g Group) error { return errors.Join(g.AllReduce(square(4)), g.AllReduce(square(4))) },
			[]string{"rank 3 waits for message 0 from rank 2"},
		},
		"too few": {
			func(g Group) error { return g.AllToAll(squares(4, 3), squares(3, 3)) }, needy["AllToAll"], []string{"src has 3 matrices; the group has 4"},
		},
		"no host memory": {
			func(g Group) error { return g.AllReduce(compute.Mat{Buf: device{}, Rows: 1, Cols: 1, Stride: 1}) }, needy["AllReduce"], []string{"HostBuffer"},
		},
		"outside": {
			func(g Group) error { return g.AllReduce(compute.Mat{Buf: make(heap, 15), Rows: 4, Cols: 4, Stride: 4}) }, needy["AllReduce"], []string{"not inside its buffer of 15"},
		},
		"no such root": {
			func(g Group) error { return g.Broadcast(4, square(4)) }, needy["Broadcast"], []string{"root 4 is not in a group of 4"},
		},
		"to itself": {
			func(g Group) error { return g.Send(3, square(4)) }, needy["Barrier"], []string{"with itself"},
		},
	} {
		for kind, start := range kinds {
			t.Run(kind+"/"+name, func(t *testing.T) {
				t.Parallel()
				ws := start(t)
				for i, err := range together(t, ws, func(w *World) error {
					g, err := w.Group("all", everybody)
					if err != nil {
						return err
					}
					call := c.rest
					if w.Rank() == 3 {
						call = c.odd
					}
					for err == nil {
						err = call(g)
					}
					return err
				}) {
					found := false
					for _, says := range c.says {
						found = found || strings.Contains(fmt.Sprint(err), strings.ReplaceAll(says, `\`, ""))
					}
					if !found {
						t.Errorf("rank %d: got error %v; want one that says %q", i, err, c.says)
					}
				}
				shut(t, ws)
			})
		}
	}
}

// device is memory that the host cannot see.
type device struct{}

func (device) Bytes() int { return 4 }

// TestCircle has ranks wait for each other across groups and processes.
func TestCircle(t *testing.T) {
	for kind, start := range kinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			ws := start(t)
			for i, err := range together(t, ws, func(w *World) error {
				a, err := w.Group("a", everybody)
				if err != nil {
					return err
				}
				b, err := w.Group("b", []int{3, 2, 1, 0})
				if err != nil {
					return err
				}
				if w.Rank() == 1 {
					a, b = b, a
				}
				return errors.Join(a.Barrier(), b.Barrier())
			}) {
				if err == nil || !strings.Contains(err.Error(), "wait for each other") {
					t.Errorf("rank %d: %v", i, err)
				}
				var d *DeadlockError
				if kind == "local" && (!errors.As(err, &d) || len(d.Waits) < 2) {
					t.Errorf("rank %d: %#v", i, err)
				}
			}
			shut(t, ws)
		})
	}
}

// TestNoFalseCircle keeps ranks waiting for each other in many ways that all end.
func TestNoFalseCircle(t *testing.T) {
	for kind, start := range kinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			ws := start(t)
			r := newRand(5)
			naps := make([][]time.Duration, len(ws))
			for i := range naps {
				for range 40 {
					naps[i] = append(naps[i], time.Duration(r.IntN(20)/18)*30*time.Millisecond)
				}
			}
			all(t, ws, func(w *World, g Group) error {
				n := len(ws)
				for k := range 40 {
					time.Sleep(naps[w.Rank()][k])
					// A ring: everybody waits for the one before, except that rank 0 begins.
					next, before := (w.Rank()+1)%n, (w.Rank()+n-1)%n
					send := func() error { return g.Send(next, square(60)) }
					recv := func() error { return g.Recv(before, square(60)) }
					first, second := recv, send
					if w.Rank() == 0 {
						first, second = send, recv
					}
					if err := errors.Join(first(), second()); err != nil {
						return err
					}
				}
				return nil
			})
			shut(t, ws)
		})
	}
}

// TestGroupLists has members give different lists for one name.
func TestGroupLists(t *testing.T) {
	for kind, start := range kinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			ws := start(t)
			for i, err := range together(t, ws, func(w *World) error {
				list := everybody
				if w.Rank() == 3 {
					list = []int{0, 1, 3, 2}
				}
				g, err := w.Group("x", list)
				for err == nil {
					err = g.Barrier()
				}
				return err
			}) {
				if err == nil || !strings.Contains(err.Error(), "[0 1 3 2]") || !strings.Contains(err.Error(), "[0 1 2 3]") {
					t.Errorf("rank %d: %v", i, err)
				}
			}
			shut(t, ws)
		})
	}
	for _, c := range []struct {
		name  string
		ranks []int
		says  string
	}{
		{"none", nil, "no ranks"},
		{"far", []int{0, 9}, "rank 9 is not in a world of 2"},
		{"twice", []int{0, 1, 0}, "twice"},
		{"without", []int{1}, "rank 0 is not in it"},
		{strings.Repeat("n", maxName+1), []int{0}, "bytes long"},
	} {
		ws := Local(2)
		if _, err := ws[0].Group(c.name, c.ranks); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%v: %v", c.ranks, err)
		}
		shut(t, ws)
	}
}

// TestDisjointGroupsShareAName uses one name for several groups.
func TestDisjointGroupsShareAName(t *testing.T) {
	for kind, start := range kinds {
		t.Run(kind, func(t *testing.T) {
			ws := start(t)
			for i, err := range together(t, ws, func(w *World) error {
				g, err := w.Group("pair", []int{w.Rank() % 2, w.Rank()%2 + 2})
				if err != nil {
					return err
				}
				same, err := w.Group("pair", []int{w.Rank() % 2, w.Rank()%2 + 2})
				if err != nil || same != g {
					return fmt.Errorf("a second membership: %v", err)
				}
				m := square(1)
				m.Buf.(heap)[0] = float32(w.Rank())
				if err := g.AllReduce(m); err != nil {
					return err
				}
				if got, want := m.Buf.(heap)[0], float32(2+2*(w.Rank()%2)); got != want {
					return fmt.Errorf("got %v, want %v", got, want)
				}
				return nil
			}) {
				if err != nil {
					t.Errorf("rank %d: %v", i, err)
				}
			}
			shut(t, ws)
		})
	}
}

// TestRunAhead lets a pipeline stage be one micro-batch, and more, ahead of the next one.
func TestRunAhead(t *testing.T) {
	for kind, start := range kinds {
		t.Run(kind, func(t *testing.T) {
			ws := start(t)
			all(t, ws, func(w *World, g Group) error {
				switch w.Rank() {
				case 0:
					m := square(200)
					for i := range queueDepth + 1 {
						m.Buf.(heap)[0] = float32(i)
						if err := g.Send(3, m); err != nil {
							return err
						}
					}
				case 3:
					if err := awaitSleep(ws[:1]); err != nil { // it has sent all that there is room for
						return err
					}
					m := square(200)
					for i := range queueDepth + 1 {
						if err := g.Recv(0, m); err != nil {
							return err
						}
						if m.Buf.(heap)[0] != float32(i) {
							return fmt.Errorf("message %d is %v", i, m.Buf.(heap)[0])
						}
					}
				}
				return nil
			})
			shut(t, ws)
		})
	}
}

// TestSilence is in synctest's time.
func TestSilence(t *testing.T) {
	t.Run("computing is no silence", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			ws := piped(t, 2*time.Second, true)
			all(t, ws, func(w *World, g Group) error {
				if w.Rank() == 1 {
					time.Sleep(patience * 3 / 4)
				}
				return g.AllReduce(square(4))
			})
			shut(t, ws)
		})
	})
	t.Run("a stuck write", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			ws := piped(t, time.Hour, false)
			time.AfterFunc(time.Second, func() { ws[0].Fail(errors.New("smoke")) })
			start := time.Now()
			g := spread{&member{group: newGroup(ws[0].p, 0, "all", []int{0, 1}), self: ws[0].p.ranks[0]}}
			if err := g.Send(1, square(4)); err == nil || !strings.Contains(err.Error(), "smoke") {
				t.Errorf("got error %v", err)
			}
			if d := time.Since(start); d > time.Second+lastWords {
				t.Errorf("it took %v", d)
			}
			shut(t, ws)
		})
	})
	for name, call := range map[string]func(Group) error{
		"recv":      func(g Group) error { return g.Recv(1, square(4)) },
		"send":      func(g Group) error { return g.Send(1, square(4)) }, // the pipe takes nothing
		"allreduce": func(g Group) error { return g.AllReduce(square(4)) },
	} {
		t.Run("stopped/"+name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const silence = 2 * time.Second
				ws := piped(t, silence, false)
				start := time.Now()
				g := spread{&member{group: newGroup(ws[0].p, 0, "all", []int{0, 1}), self: ws[0].p.ranks[0]}}
				err := call(g)
				var lost *LostError
				if !errors.As(err, &lost) || !strings.Contains(err.Error(), "rank 1 failed") || !strings.Contains(err.Error(), "nothing heard for 2s") {
					t.Errorf("got error %v", err)
				}
				if d := time.Since(start); d < silence*7/8 || d > silence {
					t.Errorf("it took %v to find out", d)
				}
				shut(t, ws)
			})
		})
	}
}

// TestStoppedItself has a process that did not run for long find what came meanwhile.
func TestStoppedItself(t *testing.T) {
	for name, c := range map[string]struct {
		late late
		err  error
	}{
		"something came": {late{data: "hello"}, nil},
		"nothing came":   {late{}, os.ErrDeadlineExceeded},
	} {
		t.Run(name, func(t *testing.T) {
			w := watched{link: &link{p: newProcess(2, []int{0}), conn: &c.late, silence: time.Second}}
			b := make([]byte, 9)
			n, err := w.Read(b)
			if string(b[:n]) != c.late.data || (err == nil) != (c.err == nil) {
				t.Errorf("got %q, %v", b[:n], err)
			}
		})
	}
}

// late is a connection whose reader wakes up after the deadline.
type late struct {
	silent
	reads int
	data  string
}

func (l *late) Read(b []byte) (int, error) {
	if l.reads++; l.reads == 1 || l.data == "" {
		return 0, os.ErrDeadlineExceeded
	}
	return copy(b, l.data), nil
}
