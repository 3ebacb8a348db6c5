package layout

import (
	"encoding/json"
	"errors"
	"reflect"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func holdings(t testing.TB, g Geometry, tp int, stages ...int) []Holding {
	t.Helper()
	h, err := g.Holdings(tp, stages)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func compile(t testing.TB, g Geometry, src, dst []Holding) *Template {
	t.Helper()
	template, err := Compile(g, src, dst)
	if err != nil {
		t.Fatal(err)
	}
	return template
}

func TestHoldings(t *testing.T) {
	g := Geometry{BlockSize: 16, Layers: 12, KVHeads: 4, HeadDim: 8, Planes: 2, ElementBytes: 2}
	got := holdings(t, g, 2, 5, 7)
	want := []Holding{{0, 5, 0, 2}, {0, 5, 2, 2}, {5, 7, 0, 2}, {5, 7, 2, 2}}
	if !slices.Equal(got, want) {
		t.Errorf("uneven stages: %v, want %v", got, want)
	}
	got = holdings(t, g, 8, 12)
	want = []Holding{{0, 12, 0, 1}, {0, 12, 0, 1}, {0, 12, 1, 1}, {0, 12, 1, 1}, {0, 12, 2, 1}, {0, 12, 2, 1}, {0, 12, 3, 1}, {0, 12, 3, 1}}
	if !slices.Equal(got, want) {
		t.Errorf("more ranks than heads: %v, want %v", got, want)
	}
	for _, bad := range []struct {
		tp     int
		stages []int
	}{{3, []int{12}}, {6, []int{12}}, {0, []int{12}}, {1, []int{11}}, {1, []int{12, 0}}, {1, nil}, {1, []int{13}}} {
		if h, err := g.Holdings(bad.tp, bad.stages); err == nil {
			t.Errorf("tp=%d stages=%v gives %v", bad.tp, bad.stages, h)
		}
	}
	for _, bad := range []Geometry{{}, {16, 12, 4, -8, 2, 2}, {1 << 20, 1 << 20, 4, 8, 2, 2}, {1 << 62, 4, 1, 1, 1, 1}} {
		if h, err := bad.Holdings(1, []int{bad.Layers}); err == nil {
			t.Errorf("%+v gives %v", bad, h)
		}
	}
}

func TestEvenStages(t *testing.T) {
	for _, tt := range []struct {
		layers, pp int
		want       []int
	}{{12, 1, []int{12}}, {12, 3, []int{4, 4, 4}}, {10, 4, []int{2, 3, 2, 3}}, {3, 3, []int{1, 1, 1}}, {3, 4, nil}, {3, 0, nil}} {
		got, err := EvenStages(tt.layers, tt.pp)
		if !slices.Equal(got, tt.want) || (err != nil) != (tt.want == nil) {
			t.Errorf("%d layers over %d: %v, %v, want %v", tt.layers, tt.pp, got, err, tt.want)
		}
	}
}

func TestEqualLayoutsMoveRuns(t *testing.T) {
	g := Geometry{BlockSize: 32, Layers: 4, KVHeads: 2, HeadDim: 8, Planes: 2, ElementBytes: 2}
	h := holdings(t, g, 1, 4)
	template := compile(t, g, h, h)
	if len(template.Legs) != 1 || len(template.Legs[0].Runs) != 1 {
		t.Fatalf("%+v", template)
	}
	n := g.BlockBytes(h[0])
	if n != 4*2*2*32*8*2 {
		t.Errorf("a block has %d bytes", n)
	}
	got := template.Legs[0].Apply(nil, []int32{3, 4, 5, 9, 10, 2}, []int32{0, 1, 2, 3, 4, 6})
	want := []Copy{{3 * n, 0, 3 * n}, {9 * n, 3 * n, 2 * n}, {2 * n, 6 * n, n}}
	if !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	// A leg's copies never merge into those of the leg before: they are of another pair of ranks.
	again := template.Legs[0].Apply([]Copy{{0, 0, n}}, []int32{1}, []int32{1})
	if want := []Copy{{0, 0, n}, {n, n, n}}; !slices.Equal(again, want) {
		t.Errorf("got %v, want %v", again, want)
	}
}

// TP 2 to TP 4 with 8 heads: what rank 1 of 4 (heads 2, 3) reads of rank 0 of 2 (heads 0..3), from its own head 2 on
// to head 0. A head's tokens lie together, so both heads are one run of 128 KiB a layer and plane; where heads lie
// together within a token, as in Megatron-LM, they are 256 fragments of 512 bytes.
func TestTensorParallelFanOut(t *testing.T) {
	g := Geometry{BlockSize: 256, Layers: 2, KVHeads: 8, HeadDim: 128, Planes: 2, ElementBytes: 2}
	template := compile(t, g, holdings(t, g, 2, 2), holdings(t, g, 4, 2))
	head := int64(256 * 128 * 2)
	var legs [][2]int
	for _, l := range template.Legs {
		legs = append(legs, [2]int{l.Src, l.Dst})
	}
	if want := [][2]int{{0, 0}, {0, 1}, {1, 2}, {1, 3}}; !slices.Equal(legs, want) {
		t.Fatalf("legs %v, want %v", legs, want)
	}
	want := Leg{Src: 0, Dst: 1, SrcBlock: 16 * head, DstBlock: 8 * head, Runs: []Run{
		{2 * head, 0, 2 * head}, {6 * head, 2 * head, 2 * head}, {10 * head, 4 * head, 2 * head}, {14 * head, 6 * head, 2 * head}}}
	if got := template.Legs[1]; !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v\nwant %+v", got, want)
	}
}

func TestUnevenPipeline(t *testing.T) {
	g := Geometry{BlockSize: 16, Layers: 12, KVHeads: 2, HeadDim: 4, Planes: 2, ElementBytes: 4}
	template := compile(t, g, holdings(t, g, 1, 12), holdings(t, g, 1, 5, 7))
	layer := int64(2 * 2 * 16 * 4 * 4)
	want := []Leg{
		{Src: 0, Dst: 0, SrcBlock: 12 * layer, DstBlock: 5 * layer, Runs: []Run{{0, 0, 5 * layer}}},
		{Src: 0, Dst: 1, SrcBlock: 12 * layer, DstBlock: 7 * layer, Runs: []Run{{5 * layer, 0, 7 * layer}}},
	}
	if !reflect.DeepEqual(template.Legs, want) {
		t.Errorf("got %+v\nwant %+v", template.Legs, want)
	}
}

func TestReplicasAreReadOnce(t *testing.T) {
	g := Geometry{BlockSize: 16, Layers: 1, KVHeads: 2, HeadDim: 4, Planes: 1, ElementBytes: 4}
	template := compile(t, g, holdings(t, g, 8, 1), holdings(t, g, 1, 1))
	var from []int
	for _, l := range template.Legs {
		from = append(from, l.Src)
	}
	if want := []int{0, 4}; !slices.Equal(from, want) {
		t.Errorf("read from %v, want one of each group of replicas %v", from, want)
	}
	var pairs [][2]int
	for _, l := range compile(t, g, holdings(t, g, 8, 1), holdings(t, g, 4, 1)).Legs {
		pairs = append(pairs, [2]int{l.Src, l.Dst})
	}
	if want := [][2]int{{0, 0}, {1, 1}, {4, 2}, {5, 3}}; !slices.Equal(pairs, want) {
		t.Errorf("from and to %v, want the readers spread over the replicas %v", pairs, want)
	}
}

func TestCoverage(t *testing.T) {
	g := Geometry{BlockSize: 16, Layers: 4, KVHeads: 4, HeadDim: 4, Planes: 2, ElementBytes: 2}
	whole := holdings(t, g, 1, 4)
	for _, tt := range []struct {
		name string
		src  []Holding
		want CoverageError
	}{
		{"no source", nil, CoverageError{0, 0, 0, 0}},
		{"a stage is missing", []Holding{{0, 2, 0, 4}}, CoverageError{0, 2, 0, 0}},
		{"a rank is missing", []Holding{{0, 4, 0, 2}, {0, 4, 3, 1}}, CoverageError{0, 0, 2, 0}},
		{"stages overlap", []Holding{{0, 3, 0, 4}, {2, 2, 0, 4}}, CoverageError{0, 2, 0, 2}},
	} {
		_, err := Compile(g, tt.src, whole)
		var coverage *CoverageError
		if !errors.As(err, &coverage) || *coverage != tt.want {
			t.Errorf("%s: %v, want %v", tt.name, err, &tt.want)
		}
	}
	for _, bad := range []Holding{{-1, 1, 0, 1}, {0, 5, 0, 4}, {3, 2, 0, 4}, {0, 4, 4, 1}, {0, 0, 0, 4}, {0, 1 << 62, 1, 1 << 62}} {
		if _, err := Compile(g, []Holding{bad}, whole); err == nil {
			t.Errorf("%+v is accepted", bad)
		}
	}
}

// element says which value of the model's cache lies in one element of a rank's block.
type element struct{ block, layer, plane, head, inHead int }

// drawn is what the ranks of a random engine hold.
func drawn(t *rapid.T, g Geometry, name string) []Holding {
	var widths []int
	for _, tp := range []int{1, 2, 3, 4, 6, 8, 12, 16} {
		if g.KVHeads%tp == 0 || tp%g.KVHeads == 0 {
			widths = append(widths, tp)
		}
	}
	var stages []int
	for left := g.Layers; left > 0; left -= stages[len(stages)-1] {
		stages = append(stages, rapid.IntRange(1, left).Draw(t, name+" stage"))
	}
	h, err := g.Holdings(rapid.SampledFrom(widths).Draw(t, name+" tp"), stages)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func drawnGeometry(t *rapid.T) Geometry {
	return Geometry{
		BlockSize: rapid.IntRange(1, 3).Draw(t, "block size"), Layers: rapid.IntRange(1, 7).Draw(t, "layers"),
		KVHeads: rapid.SampledFrom([]int{1, 2, 4, 6, 8}).Draw(t, "heads"), HeadDim: rapid.IntRange(1, 2).Draw(t, "dim"),
		Planes: rapid.IntRange(1, 2).Draw(t, "planes"), ElementBytes: 1,
	}
}

// TestEveryByteOnce applies templates of random layouts to simulated memories. Every byte of a destination's blocks is
// written once, by a rank that has it, and is what an unsharded copy would have put there; nothing else is written;
// and there are no more copies than a run for each layer, plane, block and range of heads.
func TestEveryByteOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		g := drawnGeometry(t)
		src, dst := drawn(t, g, "source"), drawn(t, g, "destination")
		template, err := Compile(g, src, dst)
		if err != nil {
			t.Fatal(err)
		}
		n := rapid.IntRange(1, 5).Draw(t, "blocks")
		srcBlocks := rapid.Permutation([]int32{0, 1, 2, 3, 4, 5, 6}).Draw(t, "from")[:n]
		dstBlocks := rapid.Permutation([]int32{0, 1, 2, 3, 4, 5, 6}).Draw(t, "to")[:n]
		moved := make([]map[int64]element, len(dst))
		for i := range moved {
			moved[i] = map[int64]element{}
		}
		counts := make([]int, len(dst))
		for _, l := range template.Legs {
			from := memory(g, src[l.Src], srcBlocks)
			copies := l.Apply(nil, srcBlocks, dstBlocks)
			counts[l.Dst] += len(copies)
			for _, c := range copies {
				for i := range c.Len {
					if _, ok := moved[l.Dst][c.Dst+i]; ok {
						t.Fatalf("rank %d: byte %d is written twice", l.Dst, c.Dst+i)
					}
					e, ok := from[c.Src+i]
					if !ok {
						t.Fatalf("source rank %d has nothing at %d", l.Src, c.Src+i)
					}
					moved[l.Dst][c.Dst+i] = e
				}
			}
		}
		for rank, h := range dst {
			if want := memory(g, h, dstBlocks); !reflect.DeepEqual(moved[rank], want) {
				t.Fatalf("rank %d holds %v, want %v", rank, moved[rank], want)
			}
			ranges := map[int]bool{} // where ranges of heads begin that the sources have
			for _, s := range src {
				if part, ok := intersect(s, h); ok {
					ranges[part.Head] = true
				}
			}
			if most := h.Layers * g.Planes * n * len(ranges); counts[rank] > most {
				t.Errorf("%d copies to rank %d, at most %d are needed", counts[rank], rank, most)
			}
		}
	})
}

// Of replicas none has to give much more than another, and each destination reads only one of them.
func TestReplicasShareTheLoad(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		g := drawnGeometry(t)
		src, dst := drawn(t, g, "source"), drawn(t, g, "destination")
		for range rapid.IntRange(0, 2).Draw(t, "data-parallel replicas") {
			src = append(src, src...)
		}
		template, err := Compile(g, src, dst)
		if err != nil {
			t.Fatal(err)
		}
		readers, pairs := make([]int, len(src)), map[[2]int]bool{}
		for _, l := range template.Legs {
			if pairs[[2]int{l.Src, l.Dst}] {
				t.Fatalf("ranks %d and %d have two legs", l.Src, l.Dst)
			}
			pairs[[2]int{l.Src, l.Dst}] = true
			readers[l.Src]++
		}
		for i, h := range src {
			for j, other := range src[:i] {
				if h == other && max(readers[i], readers[j])-min(readers[i], readers[j]) > 1 {
					t.Errorf("replicas %d and %d have %d and %d readers", j, i, readers[j], readers[i])
				}
				for k := range dst {
					if h == other && pairs[[2]int{i, k}] && pairs[[2]int{j, k}] {
						t.Errorf("rank %d reads both %d and %d, which are replicas", k, j, i)
					}
				}
			}
		}
	})
}

// Any engine whose ranks are found to hold the cache whole can serve any holding of it; one that is not would have
// to be refused by somebody.
func TestCovered(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		g := Geometry{
			BlockSize: 1, Layers: rapid.IntRange(1, 6).Draw(t, "layers"), KVHeads: rapid.IntRange(1, 6).Draw(t, "heads"),
			HeadDim: 1, Planes: 1, ElementBytes: 1,
		}
		ranks := cutUp(t, g.Whole())
		for i := range rapid.IntRange(0, 2).Draw(t, "replicas") {
			ranks = append(ranks, ranks[i%len(ranks)])
		}
		switch rapid.IntRange(0, 3).Draw(t, "damage") {
		case 1:
			i := rapid.IntRange(0, len(ranks)-1).Draw(t, "lost")
			ranks = slices.Delete(ranks, i, i+1)
		case 2:
			ranks = append(ranks, anyHolding(t, g))
		case 3:
			ranks[rapid.IntRange(0, len(ranks)-1).Draw(t, "changed")] = anyHolding(t, g)
		}
		want := error(nil)
		for layer := range g.Layers {
			for head := range g.KVHeads {
				holders := map[Holding]bool{}
				for _, h := range ranks {
					if layer >= h.Layer && layer < h.Layer+h.Layers && head >= h.Head && head < h.Head+h.Heads {
						holders[h] = true
					}
				}
				if n := len(holders); n != 1 && want == nil {
					want = &CoverageError{Layer: layer, Head: head, Sources: n}
				}
			}
		}
		err := g.Covered(ranks)
		if !reflect.DeepEqual(err, want) {
			t.Fatalf("%v: %v, want %v", ranks, err, want)
		}
		dst := []Holding{anyHolding(t, g), g.Whole(), anyHolding(t, g)}
		if _, compiled := Compile(g, ranks, dst); (compiled == nil) != (err == nil) {
			t.Errorf("%v to %v: %v, though they were found: %v", ranks, dst, compiled, err)
		}
	})
	g := Geometry{BlockSize: 16, Layers: 4, KVHeads: 4, HeadDim: 4, Planes: 2, ElementBytes: 2}
	for _, bad := range [][]Holding{{{0, 5, 0, 4}}, {{0, 4, 0, 4}, {3, 2, 0, 4}}, {{0, 4, -1, 5}}} {
		var coverage *CoverageError
		if err := g.Covered(bad); err == nil || errors.As(err, &coverage) {
			t.Errorf("%v: %v", bad, err)
		}
	}
	if err := (Geometry{}).Covered(nil); err == nil {
		t.Error("an empty geometry is accepted")
	}
}

// cutUp divides a holding, again and again.
func cutUp(t *rapid.T, h Holding) []Holding {
	switch rapid.IntRange(0, 2).Draw(t, "cut") {
	case 1:
		if h.Layers > 1 {
			n := rapid.IntRange(1, h.Layers-1).Draw(t, "layers")
			return append(cutUp(t, Holding{h.Layer, n, h.Head, h.Heads}), cutUp(t, Holding{h.Layer + n, h.Layers - n, h.Head, h.Heads})...)
		}
	case 2:
		if h.Heads > 1 {
			n := rapid.IntRange(1, h.Heads-1).Draw(t, "heads")
			return append(cutUp(t, Holding{h.Layer, h.Layers, h.Head, n}), cutUp(t, Holding{h.Layer, h.Layers, h.Head + n, h.Heads - n})...)
		}
	}
	return []Holding{h}
}

func anyHolding(t *rapid.T, g Geometry) Holding {
	layer, head := rapid.IntRange(0, g.Layers-1).Draw(t, "layer"), rapid.IntRange(0, g.KVHeads-1).Draw(t, "head")
	return Holding{layer, rapid.IntRange(1, g.Layers-layer).Draw(t, "layers"), head, rapid.IntRange(1, g.KVHeads-head).Draw(t, "heads")}
}

// memory lays out what a rank's pool holds after the i-th block of a request was put in blocks[i],
// written down from the definition [block][layer][plane][head][token][dim].
func memory(g Geometry, h Holding, blocks []int32) map[int64]element {
	m := map[int64]element{}
	for i, b := range blocks {
		at := int64(b) * g.BlockBytes(h)
		for l := range h.Layers {
			for p := range g.Planes {
				for hd := range h.Heads {
					for e := range g.BlockSize * g.HeadDim {
						m[at] = element{i, h.Layer + l, p, h.Head + hd, e}
						at++
					}
				}
			}
		}
	}
	return m
}

func TestTemplateIsPlainData(t *testing.T) {
	g := Geometry{BlockSize: 16, Layers: 3, KVHeads: 4, HeadDim: 4, Planes: 2, ElementBytes: 2}
	template := compile(t, g, holdings(t, g, 2, 1, 2), holdings(t, g, 4, 3))
	data, err := json.Marshal(template)
	if err != nil {
		t.Fatal(err)
	}
	var got Template
	if err := json.Unmarshal(data, &got); err != nil || !reflect.DeepEqual(&got, template) {
		t.Errorf("%v: got %+v, want %+v", err, got, template)
	}
}

func BenchmarkApply(b *testing.B) {
	g := Geometry{BlockSize: 32, Layers: 32, KVHeads: 8, HeadDim: 128, Planes: 2, ElementBytes: 2}
	blocks := make([]int32, 1024)
	for i := range blocks {
		blocks[i] = int32(i)
	}
	for name, tp := range map[string]int{"equal": 1, "tp1-to-tp2": 2} {
		b.Run(name, func(b *testing.B) {
			template := compile(b, g, holdings(b, g, 1, 32), holdings(b, g, tp, 32))
			var copies []Copy
			for b.Loop() {
				copies = template.Legs[0].Apply(copies[:0], blocks, blocks)
			}
			b.ReportMetric(float64(len(copies)), "copies")
		})
	}
}

// Checksums move like the tiles that they are of: in each leg the same runs, scaled.
func TestChecksumsMoveLikeTiles(t *testing.T) {
	const tile = 16
	g := Geometry{BlockSize: 64, Layers: 6, KVHeads: 4, HeadDim: 8, Planes: 2, ElementBytes: 2}
	sums, tileBytes := g.Checksums(tile), int64(tile*g.HeadDim*g.ElementBytes)
	if sums.BlockBytes(Holding{Layers: 6, Heads: 4}) != 6*2*4*4*8 {
		t.Errorf("%+v", sums)
	}
	shards := [][]Holding{
		holdings(t, g, 1, 6), holdings(t, g, 2, 6), holdings(t, g, 4, 2, 4), holdings(t, g, 8, 6), holdings(t, g, 1, 1, 5), holdings(t, g, 2, 3, 3),
	}
	for _, src := range shards {
		for _, dst := range shards {
			want := compile(t, g, src, dst)
			for i := range want.Legs {
				l := &want.Legs[i]
				l.SrcBlock, l.DstBlock = l.SrcBlock/tileBytes*8, l.DstBlock/tileBytes*8
				for j, r := range l.Runs {
					l.Runs[j] = Run{r.Src / tileBytes * 8, r.Dst / tileBytes * 8, r.Len / tileBytes * 8}
				}
			}
			if got := compile(t, sums, src, dst); !reflect.DeepEqual(got, want) {
				t.Errorf("%v to %v:\n%+v\nwant\n%+v", src, dst, got, want)
			}
		}
	}
}

// However long the prompt: one list, made at once.
func TestApplyAllocatesOnce(t *testing.T) {
	g := Geometry{BlockSize: 32, Layers: 64, KVHeads: 8, HeadDim: 128, Planes: 2, ElementBytes: 2}
	blocks := make([]int32, 256)
	for i := range blocks {
		blocks[i] = int32(2 * i)
	}
	for _, dst := range [][]Holding{holdings(t, g, 4, 32, 32), holdings(t, g, 8, 64), holdings(t, g, 1, 1, 63)} {
		template := compile(t, g, holdings(t, g, 8, 64), dst)
		for i := range template.Legs {
			l := &template.Legs[i]
			if n := testing.AllocsPerRun(5, func() { l.Apply(nil, blocks, blocks) }); n != 1 {
				t.Errorf("%v allocations for %d runs of %d blocks, want 1", n, len(l.Runs), len(blocks))
			}
			room := make([]Copy, 0, len(blocks)*len(l.Runs))
			if n := testing.AllocsPerRun(5, func() { l.Apply(room, blocks, blocks) }); n != 0 {
				t.Errorf("%v allocations into a list that has room, want none", n)
			}
		}
	}
}

// A prompt of 128k tokens goes from eight ranks to four times two stages: the copies between all pairs of ranks.
func BenchmarkApply128k(b *testing.B) {
	g := Geometry{BlockSize: 32, Layers: 64, KVHeads: 8, HeadDim: 128, Planes: 2, ElementBytes: 2}
	template := compile(b, g, holdings(b, g, 8, 64), holdings(b, g, 4, 32, 32))
	blocks := make([]int32, 128<<10/g.BlockSize)
	for i := range blocks {
		blocks[i] = int32(i)
	}
	var copies []Copy
	n, best := 0, time.Hour
	for b.Loop() {
		began := time.Now()
		n = 0
		for i := range template.Legs {
			copies = template.Legs[i].Apply(copies[:0], blocks, blocks)
			n += len(copies)
		}
		best = min(best, time.Since(began))
	}
	b.ReportMetric(float64(n), "copies")
	b.ReportMetric(best.Seconds()*1e3, "best-ms")
}
