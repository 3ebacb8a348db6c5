package collective

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"baton/compute"
)

// step is one operation, what each member of its group brings, and what the plain model says that it then
// holds.
type step struct {
	group    int
	op       op
	root     int             // of a root's operation; who sends
	partner  int             // who receives
	src, dst [][]compute.Mat // by member; one each but for AllToAll
	want     [][][]uint32    // by member, of each dst
}

// program is what all ranks of a world do.
type program struct {
	groups [][]int
	steps  []step
}

// drawProgram makes groups of random ranks in random order and operations of random shapes.
func drawProgram(t *rapid.T, size int) program {
	var p program
	seed := rapid.IntRange(0, 1<<30).Draw(t, "seed")
	r := newRand(seed)
	for range rapid.IntRange(1, 3).Draw(t, "groups") {
		p.groups = append(p.groups, r.Perm(size)[:1+r.IntN(size)])
	}
	p.groups = append(p.groups, r.Perm(size)[:1<<r.IntN(bitsOf(size))]) // one that can add
	for range rapid.IntRange(1, 8).Draw(t, "steps") {
		group := rapid.IntRange(0, len(p.groups)-1).Draw(t, "group")
		o := op(rapid.IntRange(int(opAllReduce), int(opSend)).Draw(t, "op"))
		n := len(p.groups[group])
		if o == opAllReduce && n&(n-1) != 0 || o == opSend && n == 1 {
			continue
		}
		p.steps = append(p.steps, drawStep(r, group, o, n, rapid.SampledFrom([]int{1, 20, 700}).Draw(t, "width")))
	}
	return p
}

// bitsOf is the number of powers of two up to n.
func bitsOf(n int) int {
	bits := 0
	for ; n > 0; n /= 2 {
		bits++
	}
	return bits
}

func drawStep(r *rand.Rand, group int, o op, n, width int) step {
	s := step{group: group, op: o, root: r.IntN(n)}
	s.partner = (s.root + 1 + r.IntN(max(n-1, 1))) % n
	s.src, s.dst, s.want = make([][]compute.Mat, n), make([][]compute.Mat, n), make([][][]uint32, n)
	rows, cols := r.IntN(6), r.IntN(width)
	one := func(i int, m compute.Mat) compute.Mat { s.src[i] = []compute.Mat{m}; return m }
	switch o {
	case opAllReduce:
		var parts []compute.Mat
		for i := range n {
			parts = append(parts, one(i, random(r, rows, cols)))
		}
		for i, m := range parts {
			s.dst[i], s.want[i] = []compute.Mat{m}, [][]uint32{tree(parts)}
		}
	case opAllGatherRows, opAllGatherColumns, opGatherColumns:
		drawGather(r, &s, n, rows, cols)
	case opBroadcast:
		for i := range n {
			m := one(i, random(r, rows, cols))
			s.dst[i] = []compute.Mat{m}
		}
		for i := range n {
			s.want[i] = [][]uint32{values(s.src[s.root][0])}
		}
	case opAllToAll:
		for i := range n {
			s.src[i], s.dst[i], s.want[i] = make([]compute.Mat, n), make([]compute.Mat, n), make([][]uint32, n)
		}
		for i := range n {
			for j := range n {
				a, b := r.IntN(4), r.IntN(width)
				s.src[i][j], s.dst[j][i] = random(r, a, b), random(r, a, b)
				s.want[j][i] = values(s.src[i][j])
			}
		}
	case opSend:
		m := random(r, rows, cols)
		s.src[s.root] = []compute.Mat{m}
		s.dst[s.partner], s.want[s.partner] = []compute.Mat{random(r, rows, cols)}, [][]uint32{values(m)}
	}
	return s
}

func drawGather(r *rand.Rand, s *step, n, rows, cols int) {
	var total shape
	for i := range n {
		a, b := rows, cols
		if s.op == opAllGatherRows {
			a = r.IntN(5)
		} else {
			b = r.IntN(cols + 1)
		}
		if r.IntN(5) == 0 {
			a, b = 0, 0
		}
		s.src[i] = []compute.Mat{random(r, a, b)}
		total.extend(shape{a, b}, s.op)
	}
	var want []uint32
	for row := range total.rows { // of the result
		at := 0
		for i := range n {
			m := s.src[i][0]
			switch {
			case m.Rows == 0 || m.Cols == 0:
			case s.op == opAllGatherRows:
				if row >= at && row < at+m.Rows {
					want = append(want, values(m.Slice(row-at, row-at+1))...)
				}
				at += m.Rows
			default:
				want = append(want, values(m.Slice(row, row+1))...)
			}
		}
	}
	for i := range n {
		s.dst[i] = []compute.Mat{random(r, total.rows, total.cols)}
		if s.op == opGatherColumns && i != s.root {
			s.want[i] = [][]uint32{values(s.dst[i][0])} // left alone
			continue
		}
		if s.op == opAllGatherRows && n > 1 && total.rows > 0 && r.IntN(2) == 0 {
			inPlace(s, i)
		}
		s.want[i] = [][]uint32{want}
	}
}

// inPlace makes a member's part of a gathering of rows lie where it belongs already.
func inPlace(s *step, i int) {
	at, m := 0, s.src[i][0]
	for j := range i {
		if s.src[j][0].Cols > 0 {
			at += s.src[j][0].Rows
		}
	}
	if m.Rows == 0 || m.Cols == 0 {
		return
	}
	place := s.dst[i][0].Slice(at, at+m.Rows)
	v, k := values(m), 0
	each(place, func(p *float32) { *p = math.Float32frombits(v[k]); k++ })
	s.src[i][0] = place
}

// run does one member's part.
func (s *step) run(g Group) error {
	i := g.Rank()
	switch s.op {
	case opAllReduce:
		return g.AllReduce(s.src[i][0])
	case opAllGatherRows:
		return g.AllGatherRows(s.dst[i][0], s.src[i][0])
	case opAllGatherColumns:
		return g.AllGatherColumns(s.dst[i][0], s.src[i][0])
	case opGatherColumns:
		return g.GatherColumns(s.root, s.dst[i][0], s.src[i][0])
	case opBroadcast:
		return g.Broadcast(s.root, s.src[i][0])
	case opAllToAll:
		return g.AllToAll(s.dst[i], s.src[i])
	case opBarrier:
		return g.Barrier()
	}
	switch i {
	case s.root:
		return g.Send(s.partner, s.src[i][0])
	case s.partner:
		return g.Recv(s.root, s.dst[i][0])
	}
	return nil
}

// check compares what members hold with the model.
func (p program) check(t *rapid.T) {
	for k, s := range p.steps {
		for i := range s.dst {
			for j, m := range s.dst[i] {
				if s.want[i] != nil && !slices.Equal(values(m), s.want[i][j]) {
					t.Fatalf("step %d, %v of %v in group %v: member %d holds something else than the model says:\n%s",
						k, s.op, shape{m.Rows, m.Cols}, p.groups[s.group], i, differences(values(m), s.want[i][j]))
				}
			}
			for _, m := range s.dst[i] {
				checkAround(t, m)
			}
		}
	}
}

// differences lists where two matrices differ.
func differences(got, want []uint32) string {
	var b strings.Builder
	for i := range got {
		if got[i] != want[i] && b.Len() < 2000 {
			fmt.Fprintf(&b, "element %d is %x (%g), want %x (%g)\n", i, got[i], math.Float32frombits(got[i]), want[i], math.Float32frombits(want[i]))
		}
	}
	return b.String()
}

// checkAround finds writes outside a matrix: there all is NaN.
func checkAround(t *rapid.T, m compute.Mat) {
	buf := m.Buf.(heap)
	row := 0
	for i, v := range buf {
		at := i - m.Off
		if m.Stride > 0 {
			row = at / m.Stride
		}
		inside := at >= 0 && row < m.Rows && at-row*m.Stride < m.Cols
		if !inside && v == v {
			t.Fatalf("element %d of a buffer was written, outside %+v", i, m)
		}
	}
}

// TestOperations runs random programs on worlds of all kinds.
func TestOperations(t *testing.T) {
	for name, start := range map[string]func(testing.TB) []*World{
		"local 1": func(testing.TB) []*World { return Local(1) },
		"local 2": func(testing.TB) []*World { return Local(2) },
		"local 8": func(testing.TB) []*World { return Local(8) },
		"1+1":     func(tb testing.TB) []*World { return mesh(tb, []int{0}, []int{1}) },
		"1+1+1":   func(tb testing.TB) []*World { return mesh(tb, []int{0}, []int{1}, []int{2}) },
		"2+2":     func(tb testing.TB) []*World { return mesh(tb, []int{0, 1}, []int{2, 3}) },
		"2+1, TLS": func(tb testing.TB) []*World {
			return meshWith(tb, MeshConfig{TLS: identity(tb)}, []int{0, 2}, []int{1})
		},
		"1+4+2+1, interleaved": func(tb testing.TB) []*World { return mesh(tb, []int{4}, []int{0, 3, 5, 7}, []int{6, 2}, []int{1}) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var ws []*World
			number := 0
			rapid.Check(t, func(rt *rapid.T) {
				if ws != nil && ws[0].Err() != nil {
					shut(t, ws)
					ws = nil
				}
				if ws == nil {
					ws, number = start(t), 0
				}
				number++
				p := drawProgram(rt, len(ws))
				for i, err := range together(t, ws, func(w *World) error { return p.run(w, fmt.Sprint("program ", number)) }) {
					if err != nil {
						rt.Fatalf("rank %d: %v", i, err)
					}
				}
				p.check(rt)
			})
			shut(t, ws)
		})
	}
}

// run does one rank's part of a program.
func (p program) run(w *World, name string) error {
	groups := make([]Group, len(p.groups))
	for i, ranks := range p.groups {
		if !slices.Contains(ranks, w.Rank()) {
			continue
		}
		var err error
		if groups[i], err = w.Group(fmt.Sprint(name, ", group ", i), ranks); err != nil {
			return err
		}
	}
	for _, s := range p.steps {
		if groups[s.group] == nil {
			continue
		}
		if err := s.run(groups[s.group]); err != nil {
			return err
		}
	}
	return nil
}
