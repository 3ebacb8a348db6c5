// Package compute is what a decoder needs of a device: memory that only the device reads, and about
// two dozen operations that run in the order they are given. A forward pass is a fixed list of
// operations for a given shape: nothing here branches on tensor values, and no result returns to the
// host before Read.
//
// Every backend keeps one promise (rule 4 of the architecture): the bits of one row of a result depend
// on that row's inputs alone, never on which rows share its batch, how a prompt was chunked, how large
// a cache block is, or how many threads ran.
package compute

import (
	"cmp"

	"baton/tensor"
)

// Tile is the number of cached tokens that attention folds at a time, in order of position. A cache
// block is a multiple of it, so block size cannot change a result.
const Tile = 16

// Buffer is device memory. Only the backend that made it looks inside.
type Buffer interface{ Bytes() int }

// HostBuffer is device memory that the host may read and write between operations: a backend whose
// operations have all run when they return, such as the processor's, makes no other.
type HostBuffer interface {
	Buffer
	// Host is the memory itself, aligned for f32. It is valid until the buffer is freed.
	Host() []byte
}

// Mat is a row-major f32 matrix in a Buffer. Off and Stride count elements.
type Mat struct {
	Buf        Buffer
	Off        int
	Rows, Cols int
	Stride     int
}

// Slice returns rows [from, to).
func (m Mat) Slice(from, to int) Mat {
	m.Off += from * m.Stride
	m.Rows = to - from
	return m
}

// Columns returns columns [from, to) of every row.
func (m Mat) Columns(from, to int) Mat {
	m.Off += from
	m.Cols = to - from
	return m
}

// Heads views rows of n heads side by side as one row a head: [rows, n*dim] becomes [rows*n, dim].
// The matrix must be dense (Stride == Cols).
func (m Mat) Heads(n int) Mat {
	return Mat{Buf: m.Buf, Off: m.Off, Rows: m.Rows * n, Cols: m.Cols / n, Stride: m.Cols / n}
}

// Weight is a matrix or vector of a checkpoint, made ready for the device. On the CPU it is a view of
// the memory map, in the checkpoint's own element type.
type Weight interface {
	Rows() int
	Cols() int
	DType() tensor.DType
}

// KV describes a paged key/value cache in one Buffer, laid out [block][layer][plane][head][token][dim]
// with planes k and v. A latent cache has plane k alone: a value is the first numbers of its key.
type KV struct {
	Buf       Buffer
	Blocks    int
	Layers    int
	Planes    int // 2, or 1 for a latent cache; 0 means 2
	Heads     int // KV heads
	HeadDim   int
	BlockSize int          // tokens a block, a multiple of Tile
	DType     tensor.DType // F32 or BF16
}

// BlockBytes is the size of one block over all layers, planes and heads: one contiguous run.
func (kv KV) BlockBytes() int {
	return kv.DType.RowBytes(kv.Layers * cmp.Or(kv.Planes, 2) * kv.Heads * kv.BlockSize * kv.HeadDim)
}

// Sequence says which rows of a batch belong to one request and where its cache is.
type Sequence struct {
	Row, Rows int     // rows [Row, Row+Rows) of the batch
	Position  int     // position of the first of them; the cache holds all earlier ones
	Blocks    []int32 // block table covering positions [0, Position+Rows)
}

// Linear is what a matrix product does beside multiplying: dst = src × wᵀ (+ Bias) (+ Residual).
type Linear struct {
	Bias     Weight // nil for none
	Residual bool   // add to what dst holds instead of overwriting it
	// Segments cuts the inner dimension into so many equal parts, each reduced on its own, and adds the
	// parts in a fixed binary tree: what a row-parallel layer needs so that every tensor-parallel width
	// gives the same bits. A power of two that divides the inner dimension; 0 means 1.
	Segments int
}

// Experts are the same matrix of several experts of a layer, made ready for MatMulExperts.
type Experts interface {
	Count() int
	First() int // number of the first of them in the layer
	Rows() int  // of each matrix, as the others
	Cols() int
	DType() tensor.DType
}

// Router says how logits become a token's experts. Scores are a softmax over all of them, or the sigmoid of
// each; the experts with the largest scores are chosen, and of equals the first. An expert's weight is its
// score.
type Router struct {
	Sigmoid bool
	Bias    Weight // nil, or a vector that is added to the scores for the choice alone
	// Groups cuts the experts into so many runs of equal length. Only experts of the TopGroups best runs are
	// chosen, of equals the first; a run's score is the sum of its two best experts'. 0 means 1.
	Groups, TopGroups int
	Normalize         bool    // divide each weight by the sum of the token's weights
	Scale             float32 // then multiply it by this; 0 means 1
}

// Backend is one device with one ordered stream. It is used by one goroutine at a time.
type Backend interface {
	// Load makes a checkpoint tensor usable by the device. The tensor's bytes must outlive the Weight.
	Load(t tensor.Tensor) (Weight, error)
	// LoadExperts makes the same matrix of the experts from number first on usable, or of heads for MatMulHeads;
	// all have one shape and one type.
	LoadExperts(first int, ts []tensor.Tensor) (Experts, error)
	// Alloc returns zeroed device memory.
	Alloc(bytes int) (Buffer, error)
	// Free returns the memory. Buffers from Wrap are only forgotten.
	Free(Buffer)
	// Wrap lets the device use memory that the host shares with others (a transfer's registered region).
	Wrap(data []byte) (Buffer, error)
	// Rope prepares cos/sin for positions [0, maxPositions).
	Rope(frequencies []float64, scale float32, interleaved bool, maxPositions int) (Buffer, error)

	// Embed writes row ids[i]-first of the table to dst row i. An id that the table does not reach gives a row
	// of negative zeros, which change nothing in a sum: another rank has it.
	Embed(dst Mat, table Weight, first int32, ids []int32)
	// RMSNorm writes src * rsqrt(mean(src²)+eps) * w, row by row. dst may be src.
	RMSNorm(dst, src Mat, w Weight, eps float32)
	// MatMul writes src × wᵀ as Linear says. w is [dst.Cols, src.Cols]; dst must not overlap src.
	MatMul(dst, src Mat, w Weight, opt Linear)
	// MatMulHeads multiplies row i of src with matrix i mod w.Count() of w: rows of heads, seen as Mat.Heads does.
	// dst row = src row × wᵀ, or, transposed, src row × w. dst must not overlap src.
	MatMulHeads(dst, src Mat, w Experts, transposed bool)
	// RotateHeads applies RoPE in place: x holds rows of heads side by side, each dim wide. It has as many
	// rows for each position; n of them for positions[0] come first.
	RotateHeads(x Mat, dim int, rope Buffer, positions []int32)
	// StoreKV writes rows of k and v for one layer into the cache; row i goes to slot[i] =
	// block*BlockSize + offset. For a cache of one plane v is the zero Mat.
	StoreKV(kv KV, layer int, k, v Mat, slots []int32)
	// Attention is causal grouped-query attention over the paged cache, which already holds the rows' own
	// keys and values. q is [rows, heads*headDim], and so is dst, unless the cache has one plane: then dst is
	// [rows, heads*n], and values are the first n numbers of keys.
	Attention(dst, q Mat, kv KV, layer int, seqs []Sequence, scale float32)
	// SiLUMul writes silu(gate) * up. dst may be gate.
	SiLUMul(dst, gate, up Mat)
	// Add adds src, and to each of its rows bias unless that is nil, to dst: what MatMul with a Residual does
	// with a product, for one that ranks had to sum first.
	Add(dst, src Mat, bias Weight)

	// A mixture of experts is Route, Dispatch, MatMulExperts as often as an expert has matrices, and Combine.
	// In between, a batch of n tokens is n*topK rows, one for each token and expert, in an order that only
	// the device knows: rows of one expert lie together.

	// Routing returns memory for the routes of up to maxTokens tokens to topK of experts each. It holds what
	// the last Route found.
	Routing(maxTokens, experts, topK int) (Buffer, error)
	// Route chooses experts for each row of logits, [tokens, experts]. A NaN is never preferred.
	Route(routing Buffer, logits Mat, opt Router)
	// Dispatch copies each token's row of src, [tokens, n], to its rows of dst, [tokens*topK, n].
	Dispatch(dst, src Mat, routing Buffer)
	// MatMulExperts multiplies each dispatched row with its expert's matrix, as MatMul would with opt.
	// opt has no Bias and no Residual. Rows of experts that w lacks become negative zeros, which change nothing
	// in a sum over ranks.
	MatMulExperts(dst, src Mat, w Experts, routing Buffer, opt Linear)
	// Combine adds to each row of dst the sum of a token's rows of src, [tokens*topK, n], multiplied by their
	// weights and summed in the order of choice, the best first. The first row of dst is that of token first.
	Combine(dst, src Mat, routing Buffer, first int)

	// Copy writes src to dst.
	Copy(dst, src Mat)
	// GatherRows copies src rows idx[i] to dst row i.
	GatherRows(dst, src Mat, idx []int32)

	// Read waits for everything given before and copies a matrix to the host, row by row. A device fault
	// shows here.
	Read(dst []float32, src Mat) error
	// Close stops the backend's workers and frees what it still owns.
	Close() error
}
