package cpu

import (
	"fmt"
	"math"
	"unsafe"

	"baton/compute"
	"baton/tensor"
)

// groupVectors is about how many query vectors (rows × query heads of one KV head) a piece folds
// together, so that a tile of keys and values is read, and perhaps converted, once for all of them. Of more
// than groupHeads query heads of a KV head, as of a latent cache, several pieces take their share.
const (
	groupVectors = 48
	groupHeads   = 16
)

// attendScratch is what one worker needs to fold groupVectors query vectors over the cache.
type attendScratch struct {
	mem          []byte
	vectors, dim int

	q, acc       *float32 // [vectors][dim]
	keys, values *float32 // [Tile][dim], for caches that are not f32
	scores       *float32 // [vectors][Tile]
	maximum, sum *float32 // [vectors]
	rescale      *float32 // [vectors]
	valid        *int32   // [vectors]
}

func (a *attendScratch) free() {
	if a.mem != nil {
		_ = unmapMemory(a.mem)
	}
	*a = attendScratch{}
}

// fit makes room for vectors × dim, keeping what is large enough.
func (a *attendScratch) fit(vectors, dim int) error {
	if vectors <= a.vectors && dim <= a.dim {
		return nil
	}
	vectors, dim = max(vectors, a.vectors), max(dim, a.dim)
	a.free()
	sizes := [...]int{vectors * dim, vectors * dim, compute.Tile * dim, compute.Tile * dim, vectors * compute.Tile, vectors, vectors, vectors, vectors}
	total := 0
	for _, n := range sizes {
		total += pad(n)
	}
	mem, err := mapMemory(4 * total)
	if err != nil {
		return err
	}
	*a = attendScratch{mem: mem, vectors: vectors, dim: dim}
	at := (*float32)(unsafe.Pointer(unsafe.SliceData(mem)))
	for i, p := range [...]**float32{&a.q, &a.acc, &a.keys, &a.values, &a.scores, &a.maximum, &a.sum, &a.rescale} {
		*p = at
		at = offset(at, pad(sizes[i]))
	}
	a.valid = (*int32)(unsafe.Pointer(at))
	return nil
}

// pad rounds a number of floats up to whole cache lines.
func pad(n int) int { return (n + 15) &^ 15 }

// attentionTask is one Attention. A piece is a block of query rows of one sequence with query heads that
// share one KV head; each query vector folds its own tiles in order, so pieces are independent and
// the size of a block cannot change a bit.
type attentionTask struct {
	k         *kernels
	dst, q    *float32
	dstStride int // bytes
	qStride   int
	cache     cache
	seqs      []compute.Sequence
	group     int // query heads a KV head
	parts     int // pieces that share those
	share     int // heads of each of them, but perhaps the last
	values    int // numbers of a value; they are the first of a key when the cache has one plane
	scale     float32
	blocks    []rowBlock // kept between operations for its capacity
}

// rowBlock is rows [from, from+rows) of a sequence, counted from the sequence's first.
type rowBlock struct{ seq, from, rows int }

// Attention implements compute.Backend.
func (b *Backend) Attention(dst, q compute.Mat, kv compute.KV, layer int, seqs []compute.Sequence, scale float32) {
	const op = "Attention"
	if b.err != nil {
		return
	}
	c, ok := b.cache(op, kv, layer)
	if !ok {
		return
	}
	d, ok := b.mat(op, "dst", dst)
	if !ok {
		return
	}
	s, ok := b.mat(op, "q", q)
	if !ok || c.planes == 2 && !b.sameShape(op, dst, q) {
		return
	}
	if q.Cols%(c.heads*c.dim) != 0 {
		b.fail(op, "q has %d columns for %d KV heads of %d", q.Cols, c.heads, c.dim)
		return
	}
	t := &b.attention
	group := q.Cols / (c.heads * c.dim)
	values := dst.Cols / (c.heads * group)
	if values*c.heads*group != dst.Cols || values > c.dim || dst.Rows != q.Rows {
		b.fail(op, "dst is [%d, %d] for q [%d, %d] of %d heads and values of up to %d", dst.Rows, dst.Cols, q.Rows, q.Cols, c.heads*group, c.dim)
		return
	}
	parts := pieces(group, groupHeads)
	share := pieces(group, parts)
	parts = pieces(group, share)
	rows := max(1, groupVectors/share)
	t.blocks = t.blocks[:0]
	for i := range seqs {
		if why := checkSequence(&seqs[i], q.Rows, &c); why != "" {
			b.fail(op, "sequence %d: %s", i, why)
			return
		}
		// Later rows see more of the cache: they go first, so that no long piece is left for the end.
		for from := (seqs[i].Rows - 1) / rows * rows; from >= 0 && seqs[i].Rows > 0; from -= rows {
			t.blocks = append(t.blocks, rowBlock{i, from, min(rows, seqs[i].Rows-from)})
		}
	}
	for _, w := range b.workers {
		if err := w.attend.fit(rows*share, c.dim); err != nil {
			b.fail(op, "workspace: %v", err)
			return
		}
	}
	*t = attentionTask{b.k, d, s, 4 * dst.Stride, 4 * q.Stride, c, seqs, group, parts, share, values, scale, t.blocks}
	b.pool.run(&b.boxes.attention, len(t.blocks)*c.heads*parts)
	*t = attentionTask{blocks: t.blocks[:0]}
}

// checkSequence says what is wrong with a sequence, or "".
func checkSequence(s *compute.Sequence, rows int, c *cache) string {
	if s.Row < 0 || s.Rows < 0 || s.Row > rows-s.Rows || s.Position < 0 || s.Position > math.MaxInt32 {
		return fmt.Sprintf("rows [%d, %d+%d) of %d, position %d", s.Row, s.Row, s.Rows, rows, s.Position)
	}
	need := (s.Position + s.Rows + c.block - 1) / c.block
	if len(s.Blocks) < need {
		return fmt.Sprintf("%d blocks for %d tokens, need %d", len(s.Blocks), s.Position+s.Rows, need)
	}
	for i, id := range s.Blocks[:need] {
		if id < 0 || int(id) >= c.blocks {
			return fmt.Sprintf("block table entry %d is %d, outside [0, %d)", i, id, c.blocks)
		}
	}
	return ""
}

func (t *attentionTask) run(w *scratch, piece int) {
	part := piece % t.parts
	piece /= t.parts
	blk := t.blocks[piece/t.cache.heads]
	head := piece % t.cache.heads
	seq := &t.seqs[blk.seq]
	a := &w.attend
	dim, group := t.cache.dim, min(t.share, t.group-part*t.share)
	query := head*t.group + part*t.share // the first of group query heads
	t.begin(a, seq.Row+blk.from, blk.rows, query, group)
	position := seq.Position + blk.from // of the block's first row
	for start := 0; start < position+blk.rows; start += compute.Tile {
		keys, values := t.tile(a, int(seq.Blocks[start/t.cache.block]), head, start%t.cache.block)
		first := max(0, start-position) // the first row that sees the tile
		n := (blk.rows - first) * group
		scores := offset(a.scores, first*group*compute.Tile)
		for j := 0; j < compute.Tile; j += tileRows {
			t.k.dots(offset(scores, j), 4*compute.Tile, offset(keys, j*dim), 4*dim, offset(a.q, first*group*dim), 4*dim, n, dim, nil, 0)
		}
		valid := unsafe.Slice(a.valid, blk.rows*group)
		for i := first * group; i < len(valid); i++ {
			valid[i] = int32(min(compute.Tile, position+i/group-start+1))
		}
		t.k.fold(scores, offset(a.maximum, first*group), offset(a.sum, first*group), offset(a.rescale, first*group), &valid[first*group], t.scale, n)
		// Rows inside the tile see a part of it each; what they must not see is not touched at all.
		full := min(blk.rows, max(first, start+compute.Tile-1-position))
		for r := first; r < full; r++ {
			t.weigh(a, values, r*group, group, position+r-start+1)
		}
		if full < blk.rows {
			t.weigh(a, values, full*group, (blk.rows-full)*group, compute.Tile)
		}
	}
	t.end(a, seq.Row+blk.from, blk.rows, query, group)
}

// begin gathers the query vectors of rows × a group of heads and clears their running softmaxes.
func (t *attentionTask) begin(a *attendScratch, row, rows, head, group int) {
	n := group * t.cache.dim
	for r := range rows {
		copy(floats(a.q, 4*r*n, n), floats(t.q, (row+r)*t.qStride+4*head*t.cache.dim, n))
	}
	clear(floats(a.acc, 0, rows*n))
	clear(floats(a.sum, 0, rows*group))
	for i := range floats(a.maximum, 0, rows*group) {
		*offset(a.maximum, i) = float32(math.Inf(-1))
	}
}

// tile returns 16 keys and values as f32.
func (t *attentionTask) tile(a *attendScratch, block, head, token int) (keys, values *float32) {
	c := &t.cache
	k := &c.data[c.at(block, 0, head, token)]
	v := &c.data[c.at(block, c.planes-1, head, token)]
	if c.f32 {
		return (*float32)(unsafe.Pointer(k)), (*float32)(unsafe.Pointer(v))
	}
	n := compute.Tile * c.dim
	t.k.expand[tensor.BF16](a.keys, 0, k, 0, 1, n)
	if c.planes == 1 {
		return a.keys, a.keys
	}
	t.k.expand[tensor.BF16](a.values, 0, v, 0, 1, n)
	return a.keys, a.values
}

// weigh adds the tile's first tokens values to the accumulators of query vectors [i, i+n).
func (t *attentionTask) weigh(a *attendScratch, values *float32, i, n, tokens int) {
	t.k.weigh(offset(a.acc, i*t.values), offset(a.rescale, i), offset(a.scores, i*compute.Tile), values, 4*t.cache.dim, n, t.values, tokens)
}

// end divides by the softmax's sum and writes the result.
func (t *attentionTask) end(a *attendScratch, row, rows, head, group int) {
	dim := t.values
	for r := range rows {
		for g := range group {
			i := r*group + g
			inverse := 1 / floats(a.sum, 4*i, 1)[0]
			src := floats(a.acc, 4*i*dim, dim)
			dst := floats(t.dst, (row+r)*t.dstStride+4*(head+g)*dim, dim)
			for d := range dst {
				dst[d] = src[d] * inverse
			}
		}
	}
}
