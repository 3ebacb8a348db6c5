package cpu

import (
	"cmp"
	"fmt"
	"math"
	"unsafe"

	"baton/compute"
	"baton/tensor"
)

// maxExperts bounds the scores of one row, which lie in scratch.parts, several times over.
const maxExperts = 1 << 14

// experts is the same matrix of experts first, first+1, ...
type experts struct {
	first int
	of    []*weight
}

func (e *experts) First() int          { return e.first }
func (e *experts) Count() int          { return len(e.of) }
func (e *experts) Rows() int           { return e.of[0].rows }
func (e *experts) Cols() int           { return e.of[0].cols }
func (e *experts) DType() tensor.DType { return e.of[0].dtype }

// LoadExperts implements compute.Backend.
func (b *Backend) LoadExperts(first int, ts []tensor.Tensor) (compute.Experts, error) {
	e := &experts{first: first, of: make([]*weight, len(ts))}
	for i, t := range ts {
		w, err := b.Load(t)
		if err != nil {
			return nil, err
		}
		e.of[i] = w.(*weight)
		model := e.of[0]
		if v := e.of[i]; v.vector != nil || v.rows != model.rows || v.cols != model.cols || v.dtype != model.dtype {
			return nil, &LoadError{Tensor: t.Name, Reason: fmt.Sprintf("is %v of %v; every expert must have a matrix like the first, [%d %d] of %v",
				t.Shape, t.DType, model.rows, model.cols, model.dtype)}
		}
	}
	if first < 0 || len(ts) == 0 || first+len(ts) > maxExperts {
		return nil, &LoadError{Reason: fmt.Sprintf("experts %d to %d; a layer has 1 to %d", first, first+len(ts)-1, maxExperts)}
	}
	return e, nil
}

// routing is where each token of a batch goes. A slot is a token's place for one of its experts: token
// i's are [i*topK, (i+1)*topK). Dispatched rows are in order of expert, then of slot. No Mat can reach the
// indices, so nothing but Route writes them.
type routing struct {
	owner                  *Backend
	maxTokens, count, topK int
	tokens                 int       // of the last Route
	expert, origin, row    []int32   // by slot its expert; by dispatched row its token; by slot its dispatched row
	weight                 []float32 // by slot
	start                  []int32   // by expert its first dispatched row; [count] is the number of rows
	batches                []batch   // of the product that runs
}

// batch is a run of dispatched rows of one expert.
type batch struct{ expert, row, rows int }

// Bytes implements compute.Buffer.
func (r *routing) Bytes() int {
	return 4*(len(r.expert)+len(r.origin)+len(r.row)+len(r.weight)+len(r.start)) + int(unsafe.Sizeof(batch{}))*cap(r.batches)
}

// Routing implements compute.Backend. There may be at most 16384 experts.
func (b *Backend) Routing(maxTokens, experts, topK int) (compute.Buffer, error) {
	if b.closed {
		return nil, &OpError{Op: "Routing", Err: ErrClosed}
	}
	if maxTokens < 1 || experts < 1 || experts > maxExperts || topK < 1 || topK > experts || maxTokens > math.MaxInt32/topK {
		return nil, &OpError{Op: "Routing", Reason: fmt.Sprintf("%d tokens to %d of %d experts", maxTokens, topK, experts)}
	}
	slots := maxTokens * topK
	return &routing{
		owner: b, maxTokens: maxTokens, count: experts, topK: topK,
		expert: make([]int32, slots), origin: make([]int32, slots), row: make([]int32, slots), weight: make([]float32, slots),
		start: make([]int32, experts+1), batches: make([]batch, 0, experts+slots/blockInputs),
	}, nil
}

// routing checks that tokens and dispatched rows (each -1 to skip) are those of the last Route.
func (b *Backend) routing(op string, mem compute.Buffer, tokens, rows int) (*routing, bool) {
	r, ok := mem.(*routing)
	if !ok || r == nil || r.owner != b {
		b.fail(op, "the routing was not made by this backend's Routing")
		return nil, false
	}
	if tokens >= 0 && tokens != r.tokens || rows >= 0 && rows != r.tokens*r.topK {
		b.fail(op, "%d tokens and %d dispatched rows (-1: any), where Route had %d tokens for %d experts each", tokens, rows, r.tokens, r.topK)
		return nil, false
	}
	return r, true
}

// routeTask chooses experts.
type routeTask struct {
	k      *kernels
	to     *routing
	logits *float32
	stride int // bytes
	router compute.Router
	bias   *float32 // nil for none
	piece  int
}

// Route implements compute.Backend.
func (b *Backend) Route(mem compute.Buffer, logits compute.Mat, opt compute.Router) {
	const op = "Route"
	if b.err != nil {
		return
	}
	p, ok := b.mat(op, "logits", logits)
	if !ok {
		return
	}
	r, ok := b.routing(op, mem, -1, -1)
	if !ok {
		return
	}
	if logits.Cols != r.count || logits.Rows > r.maxTokens {
		b.fail(op, "logits are [%d, %d], the routing is for up to %d tokens and %d experts", logits.Rows, logits.Cols, r.maxTokens, r.count)
		return
	}
	var bias *float32
	if opt.Bias != nil {
		if bias, ok = b.vector(op, "bias", opt.Bias, r.count); !ok {
			return
		}
	}
	opt.Groups, opt.TopGroups = cmp.Or(opt.Groups, 1), cmp.Or(opt.TopGroups, 1)
	if g, top := opt.Groups, opt.TopGroups; g < 1 || g > r.count || r.count%g != 0 || top < 1 || top > g || top*(r.count/g) < r.topK || top < g && r.count/g < 2 {
		b.fail(op, "%d experts a token, from %d of %d groups of %d experts in all", r.topK, top, g, r.count)
		return
	}
	r.tokens = logits.Rows
	b.route = routeTask{b.k, r, p, 4 * logits.Stride, opt, bias, rowsPiece(4 * r.count)}
	b.pool.run(&b.boxes.route, pieces(r.tokens, b.route.piece))
	b.route = routeTask{}
	r.group()
}

func (t *routeTask) run(w *scratch, piece int) {
	from := piece * t.piece
	for i := from; i < min(from+t.piece, t.to.tokens); i++ {
		t.token(w, i)
	}
}

func (t *routeTask) token(w *scratch, i int) {
	n, k := t.to.count, t.to.topK
	expert, weight := t.to.expert[i*k:(i+1)*k], t.to.weight[i*k:(i+1)*k]
	scores, total := floats(w.parts, 0, n), float32(1)
	if t.router.Sigmoid {
		for e, v := range floats(t.logits, i*t.stride, n) {
			scores[e] = 1 / (1 + exp32(-v))
		}
	} else {
		total = t.softmax(w, i)
	}
	t.choose(w, expert, scores)
	chosen := float32(0)
	for j, e := range expert {
		weight[j] = scores[e] / total
		chosen += weight[j]
	}
	if t.router.Sigmoid {
		chosen += 1e-20 // all may be zero
	}
	for j := range weight {
		if t.router.Normalize {
			weight[j] /= chosen
		}
		if t.router.Scale != 0 {
			weight[j] *= t.router.Scale
		}
	}
}

// softmax leaves the exponentials of row i in w.parts and returns their sum. It works in tiles of 16, by the
// kernel that attention uses: with the row's maximum known beforehand, each tile gives its exponentials and
// their sum.
func (t *routeTask) softmax(w *scratch, i int) float32 {
	n := t.to.count
	tiles := (n + compute.Tile - 1) / compute.Tile
	scores := floats(w.parts, 0, tiles*compute.Tile)
	copy(scores, floats(t.logits, i*t.stride, n))
	rest := offset(w.parts, len(scores))
	maximum, sums, rescale := floats(rest, 0, tiles), floats(rest, 4*tiles, tiles), floats(rest, 8*tiles, tiles)
	valid := unsafe.Slice((*int32)(unsafe.Pointer(offset(rest, 3*tiles))), tiles)
	largest := float32(math.Inf(-1))
	for _, v := range scores[:n] {
		largest = larger(v, largest)
	}
	for j := range tiles {
		maximum[j], sums[j], valid[j] = largest, 0, int32(min(compute.Tile, n-j*compute.Tile))
	}
	t.k.fold(&scores[0], &maximum[0], &sums[0], &rescale[0], &valid[0], 1, tiles)
	total := float32(0)
	for _, v := range sums {
		total += v
	}
	return total
}

// choose writes the experts to take: by score, with the bias, from the best groups.
func (t *routeTask) choose(w *scratch, to []int32, scores []float32) {
	n, area := len(scores), func(i int) *float32 { return offset(w.parts, i*maxExperts) }
	if t.bias != nil {
		biased := floats(area(1), 0, n)
		for e, b := range floats(t.bias, 0, n) {
			biased[e] = scores[e] + b
		}
		scores = biased
	}
	if t.router.TopGroups < t.router.Groups {
		all, size := scores, n/t.router.Groups
		pairs, best := floats(area(3), 0, t.router.Groups), unsafe.Slice((*int32)(unsafe.Pointer(area(4))), t.router.TopGroups)
		for g := range pairs {
			pairs[g] = twoLargest(all[g*size : (g+1)*size])
		}
		choose(best, pairs)
		scores = floats(area(2), 0, n)
		for e := range scores {
			scores[e] = float32(math.Inf(-1))
		}
		for _, g := range best {
			copy(scores[int(g)*size:], all[int(g)*size:(int(g)+1)*size])
		}
	}
	choose(to, scores)
}

// twoLargest is the sum of the two largest scores; a NaN counts as none.
func twoLargest(scores []float32) float32 {
	first, second := float32(math.Inf(-1)), float32(math.Inf(-1))
	for _, v := range scores {
		switch {
		case v > first:
			first, second = v, first
		case v > second:
			second = v
		}
	}
	return first + second
}

// choose writes the indices of the largest scores in descending order. Of equal scores the first wins;
// a NaN comes last.
func choose(to []int32, scores []float32) {
	key := func(i int32) float32 {
		if v := scores[i]; v == v {
			return v
		}
		return float32(math.Inf(-1))
	}
	n := 0
	for i := range int32(len(scores)) {
		v := key(i)
		if n == len(to) && !(v > key(to[n-1])) {
			continue
		}
		n = min(n+1, len(to))
		at := n - 1
		for ; at > 0 && v > key(to[at-1]); at-- {
			to[at] = to[at-1]
		}
		to[at] = i
	}
}

// group orders the slots by expert.
func (r *routing) group() {
	clear(r.start)
	slots := r.expert[:r.tokens*r.topK]
	for _, e := range slots {
		r.start[e+1]++
	}
	for e := range r.count {
		r.start[e+1] += r.start[e]
	}
	for slot, e := range slots {
		at := r.start[e]
		r.start[e]++
		r.row[slot], r.origin[at] = at, int32(slot/r.topK)
	}
	copy(r.start[1:], r.start) // each start has become the next one
	r.start[0] = 0
}

// dispatchTask copies rows of src.
type dispatchTask struct {
	dst, src             *float32
	dstStride, srcStride int // bytes
	origin               []int32
	n, piece             int
}

// Dispatch implements compute.Backend.
func (b *Backend) Dispatch(dst, src compute.Mat, mem compute.Buffer) {
	const op = "Dispatch"
	if b.err != nil {
		return
	}
	d, ok := b.mat(op, "dst", dst)
	if !ok {
		return
	}
	s, ok := b.mat(op, "src", src)
	if !ok {
		return
	}
	r, ok := b.routing(op, mem, src.Rows, dst.Rows)
	if !ok {
		return
	}
	if dst.Cols != src.Cols {
		b.fail(op, "dst has rows of %d, src of %d", dst.Cols, src.Cols)
		return
	}
	b.dispatch = dispatchTask{d, s, 4 * dst.Stride, 4 * src.Stride, r.origin[:dst.Rows], src.Cols, rowsPiece(src.Cols)}
	b.pool.run(&b.boxes.dispatch, pieces(dst.Rows, b.dispatch.piece))
	b.dispatch = dispatchTask{}
}

func (t *dispatchTask) run(_ *scratch, piece int) {
	from := piece * t.piece
	for i := from; i < min(from+t.piece, len(t.origin)); i++ {
		copy(floats(t.dst, i*t.dstStride, t.n), floats(t.src, int(t.origin[i])*t.srcStride, t.n))
	}
}

// combineTask sums the rows of each token.
type combineTask struct {
	k                    *kernels
	from                 *routing
	dst, src             *float32
	dstStride, srcStride int // bytes
	first, tokens        int
	n, piece             int
}

// Combine implements compute.Backend.
func (b *Backend) Combine(dst, src compute.Mat, mem compute.Buffer, first int) {
	const op = "Combine"
	if b.err != nil {
		return
	}
	d, ok := b.mat(op, "dst", dst)
	if !ok {
		return
	}
	s, ok := b.mat(op, "src", src)
	if !ok {
		return
	}
	r, ok := b.routing(op, mem, -1, src.Rows)
	if !ok {
		return
	}
	if first < 0 || dst.Rows > r.tokens-first {
		b.fail(op, "tokens %d to %d, of the %d that Route had", first, first+dst.Rows-1, r.tokens)
		return
	}
	if dst.Cols != src.Cols {
		b.fail(op, "dst has rows of %d, src of %d", dst.Cols, src.Cols)
		return
	}
	b.combine = combineTask{b.k, r, d, s, 4 * dst.Stride, 4 * src.Stride, first, dst.Rows, dst.Cols, rowsPiece(r.topK * dst.Cols)}
	b.pool.run(&b.boxes.combine, pieces(dst.Rows, b.combine.piece))
	b.combine = combineTask{}
}

// combineWidth is how many columns are summed at a time, in scratch.parts.
const combineWidth = 4096

func (t *combineTask) run(w *scratch, piece int) {
	r, one := t.from, floats(w.parts, 4*combineWidth, 1)
	one[0] = 1
	from := piece * t.piece
	for i := from; i < min(from+t.piece, t.tokens); i++ {
		slots := (t.first + i) * r.topK
		for col := 0; col < t.n; col += combineWidth {
			n := min(combineWidth, t.n-col)
			clear(floats(w.parts, 0, n))
			for slot := slots; slot < slots+r.topK; slot++ {
				row := floats(t.src, int(r.row[slot])*t.srcStride+4*col, n)
				t.k.weigh(w.parts, &one[0], &r.weight[slot], &row[0], 0, 1, n, 1)
			}
			dst := floats(t.dst, i*t.dstStride+4*col, n)
			t.k.finish(&dst[0], 0, w.parts, 0, nil, 1, n, 1)
		}
	}
}

// expertsTask is one MatMulExperts: a product for each batch, cut into pieces as matmulTask is.
type expertsTask struct {
	product matmulTask // what all batches share
	first   int        // number of experts[0]
	experts []*weight
	batches []batch
}

// MatMulExperts implements compute.Backend.
func (b *Backend) MatMulExperts(dst, src compute.Mat, w compute.Experts, mem compute.Buffer, opt compute.Linear) {
	const op = "MatMulExperts"
	if b.err != nil {
		return
	}
	ws, ok := w.(*experts)
	if !ok || ws == nil {
		b.fail(op, "the experts were not loaded by this backend")
		return
	}
	r, ok := b.routing(op, mem, -1, src.Rows)
	if !ok {
		return
	}
	if ws.first+len(ws.of) > r.count {
		b.fail(op, "experts %d to %d, the routing is for %d", ws.first, ws.first+len(ws.of)-1, r.count)
		return
	}
	if opt.Bias != nil || opt.Residual {
		b.fail(op, "experts take neither a bias nor a residual")
		return
	}
	t := &b.experts
	defer func() { *t = expertsTask{} }() // no pointer to memory that may be unmapped later
	if !b.product(op, &t.product, dst, src, ws.of[0], opt) || src.Rows == 0 {
		return
	}
	end := ws.first + len(ws.of)
	fillNegativeZeros(&t.product, 0, int(r.start[ws.first]))
	fillNegativeZeros(&t.product, int(r.start[end]), src.Rows)
	if t.first, t.experts, t.batches = ws.first, ws.of, r.split(ws.first, end); len(t.batches) == 0 {
		return
	}
	n := t.plan(b.pool.threads)
	if src.Rows*src.Cols*dst.Cols < smallProduct {
		b.pool.alone(&b.boxes.experts, n)
		return
	}
	if t.product.inputs >= packInputs && t.product.srcStride%packStride == 0 {
		t.product.inputs = src.Rows
		b.packInputs(&t.product)
	}
	b.pool.run(&b.boxes.experts, n)
}

// fillNegativeZeros writes to rows [from, to) of a product, whose experts another rank has.
func fillNegativeZeros(t *matmulTask, from, to int) {
	for i := from; i < to; i++ {
		negativeZeros(floats(t.dst, i*t.dstStride, t.w.rows))
	}
}

// split cuts the dispatched rows of experts [first, last) into batches: an expert's rows into as few as blocks
// allow, evenly.
func (r *routing) split(first, last int) []batch {
	r.batches = r.batches[:0]
	for e := first; e < last; e++ {
		row, end := int(r.start[e]), int(r.start[e+1])
		for parts := pieces(end-row, blockInputs); parts > 0; parts-- {
			rows := pieces(end-row, parts)
			r.batches = append(r.batches, batch{e, row, rows})
			row += rows
		}
	}
	return r.batches
}

// plan chooses the pieces of weight rows, by the largest batch, and returns the number of pieces. It
// leaves that batch's size in product.inputs.
func (t *expertsTask) plan(threads int) int {
	p := &t.product
	p.inputs = 0
	for _, b := range t.batches {
		p.inputs = max(p.inputs, b.rows)
	}
	p.cut(len(t.batches)*p.w.rows, threads)
	return p.rowPieces * len(t.batches)
}

func (t *expertsTask) run(w *scratch, piece int) {
	b := t.batches[piece/t.product.rowPieces]
	p := t.product
	p.w, p.inputs = t.experts[b.expert-t.first], b.rows
	p.src = (*float32)(unsafe.Add(unsafe.Pointer(p.src), b.row*p.srcStride))
	p.dst = (*float32)(unsafe.Add(unsafe.Pointer(p.dst), b.row*p.dstStride))
	p.fuse()
	p.run(w, piece%t.product.rowPieces)
}
