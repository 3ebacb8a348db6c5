// Package cpu is the compute backend of the processor: plain memory, a pool of workers, and kernels
// that come twice, as AVX2+FMA assembly (generated from asm/) and as portable Go, with the same bits.
// docs/numerics.md states the order of every sum.
//
// A Backend owns its workers, workspaces and the buffers it allocated. It never copies a weight matrix:
// matrices are read from the checkpoint's memory map in their own element type. It knows nothing of
// models, requests or files.
package cpu

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"unsafe"

	"baton/compute"
	"baton/tensor"
)

// Options configures a Backend.
type Options struct {
	// Threads is the number of goroutines that compute, the caller's included; 0 means GOMAXPROCS.
	Threads int
	// Portable chooses the Go kernels even where the processor could run the assembly.
	Portable bool
}

// maxThreads bounds what a mistyped flag can cost.
const maxThreads = 1024

// ErrClosed is the cause of an OpError when a Backend is used after Close.
var ErrClosed = errors.New("backend is closed")

// OpError reports an operation that was called with operands that do not fit together. Operations after
// it do nothing; the next Read returns it and clears it.
type OpError struct {
	Op     string // the Backend method
	Reason string
	Err    error // cause, when there is one
}

func (e *OpError) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("cpu: %s: %v", e.Op, e.Err)
	}
	return fmt.Sprintf("cpu: %s: %s", e.Op, e.Reason)
}

func (e *OpError) Unwrap() error { return e.Err }

// LoadError reports a checkpoint tensor that the backend cannot use.
type LoadError struct {
	Tensor string
	Reason string
}

func (e *LoadError) Error() string { return fmt.Sprintf("cpu: tensor %q: %s", e.Tensor, e.Reason) }

// Backend implements compute.Backend on the processor.
type Backend struct {
	k       *kernels
	pool    *pool
	workers []*scratch
	owned   map[*buffer]struct{}
	err     error
	closed  bool

	// The tasks are fields, so that an operation allocates nothing.
	matmul    matmulTask
	attention attentionTask
	silu      siluTask
	norm      normTask
	rotate    rotateTask
	embed     embedTask
	pack      packTask
	route     routeTask
	dispatch  dispatchTask
	experts   expertsTask
	combine   combineTask
	add       addTask
	heads     headsTask
	boxes     struct {
		matmul, attention, silu, norm, rotate, embed, pack, route, dispatch, experts, combine, add, heads task
	}
	packed []byte // grows to the largest input that was packed
}

var _ compute.Backend = (*Backend)(nil)

// New starts a backend's workers.
func New(opt Options) (*Backend, error) {
	if opt.Threads == 0 {
		opt.Threads = runtime.GOMAXPROCS(0)
	}
	if opt.Threads < 0 || opt.Threads > maxThreads {
		return nil, fmt.Errorf("cpu: Threads is %d; it must be between 0 (all processors) and %d", opt.Threads, maxThreads)
	}
	k := &portableKernels
	if !opt.Portable {
		k = bestKernels()
	}
	b := &Backend{k: k, owned: map[*buffer]struct{}{}}
	for range opt.Threads {
		w, err := newScratch()
		if err != nil {
			b.freeScratch()
			return nil, fmt.Errorf("cpu: workspace of a worker: %w", err)
		}
		b.workers = append(b.workers, w)
	}
	b.boxes.matmul, b.boxes.attention, b.boxes.silu = &b.matmul, &b.attention, &b.silu
	b.boxes.norm, b.boxes.rotate, b.boxes.embed, b.boxes.pack = &b.norm, &b.rotate, &b.embed, &b.pack
	b.boxes.route, b.boxes.dispatch, b.boxes.experts, b.boxes.combine = &b.route, &b.dispatch, &b.experts, &b.combine
	b.boxes.add, b.boxes.heads = &b.add, &b.heads
	b.pool = newPool(b.workers, spinRounds)
	return b, nil
}

// Kernels names the instruction set in use: "avx2" or "portable".
func (b *Backend) Kernels() string { return b.k.name }

// Close stops the workers and frees what the backend owns. Buffers and weights of it must not be used
// afterwards.
func (b *Backend) Close() error {
	if b.closed {
		return nil
	}
	b.closed = true
	b.err = &OpError{Op: "Close", Err: ErrClosed}
	b.pool.close()
	b.freeScratch()
	var errs []error
	if b.packed != nil {
		errs = append(errs, unmapMemory(b.packed))
		b.packed = nil
	}
	for buf := range b.owned {
		errs = append(errs, unmapMemory(buf.data))
		buf.data = nil
	}
	b.owned = nil
	return errors.Join(errs...)
}

func (b *Backend) freeScratch() {
	for _, w := range b.workers {
		w.free()
	}
}

// fail records the first error; operations check b.err before they touch memory.
func (b *Backend) fail(op, format string, args ...any) {
	if b.err == nil {
		b.err = &OpError{Op: op, Reason: fmt.Sprintf(format, args...)}
	}
}

// buffer is device memory: pages of its own, or somebody else's bytes.
type buffer struct {
	data []byte
	rope *ropeShape // set when it holds a table made by Rope
}

func (b *buffer) Bytes() int { return len(b.data) }

// Host implements compute.HostBuffer.
func (b *buffer) Host() []byte { return b.data }

var _ compute.HostBuffer = (*buffer)(nil)

// at is the address of f32 element i.
func (b *buffer) at(i int) *float32 {
	return (*float32)(unsafe.Add(unsafe.Pointer(unsafe.SliceData(b.data)), 4*i))
}

// Alloc returns zeroed memory outside the Go heap.
func (b *Backend) Alloc(bytes int) (compute.Buffer, error) {
	if b.closed {
		return nil, &OpError{Op: "Alloc", Err: ErrClosed}
	}
	if bytes < 0 {
		return nil, &OpError{Op: "Alloc", Reason: fmt.Sprintf("size is %d bytes", bytes)}
	}
	buf := &buffer{}
	if bytes > 0 {
		data, err := mapMemory(bytes)
		if err != nil {
			return nil, &OpError{Op: "Alloc", Err: fmt.Errorf("%d bytes: %w", bytes, err)}
		}
		buf.data = data
		b.owned[buf] = struct{}{}
	}
	return buf, nil
}

// Free returns a buffer's memory. Freeing nil, twice, or a wrapped buffer does nothing but forget it.
func (b *Backend) Free(mem compute.Buffer) {
	if r, ok := mem.(*routing); ok {
		*r = routing{}
	}
	buf, ok := mem.(*buffer)
	if !ok {
		return
	}
	if _, ok := b.owned[buf]; ok {
		delete(b.owned, buf)
		if err := unmapMemory(buf.data); err != nil {
			b.fail("Free", "%v", err)
		}
	}
	buf.data = nil
}

// Wrap uses the caller's memory, which must outlive the buffer. It must start at a multiple of 4.
func (b *Backend) Wrap(data []byte) (compute.Buffer, error) {
	if b.closed {
		return nil, &OpError{Op: "Wrap", Err: ErrClosed}
	}
	if uintptr(unsafe.Pointer(unsafe.SliceData(data)))%4 != 0 {
		return nil, &OpError{Op: "Wrap", Reason: "memory must be aligned to 4 bytes"}
	}
	return &buffer{data: data}, nil
}

// weight is a view of a checkpoint's tensor. Vectors (norms, biases) are small and used on every row,
// so they are also kept as f32.
type weight struct {
	dtype      tensor.DType
	rows, cols int
	rowBytes   int
	data       []byte
	vector     []float32 // nil for a matrix
}

func (w *weight) Rows() int           { return w.rows }
func (w *weight) Cols() int           { return w.cols }
func (w *weight) DType() tensor.DType { return w.dtype }

// row is the address of row i.
func (w *weight) row(i int) *byte {
	return (*byte)(unsafe.Add(unsafe.Pointer(unsafe.SliceData(w.data)), i*w.rowBytes))
}

// Load checks that a tensor's bytes hold what its shape says and keeps a view of them.
func (b *Backend) Load(t tensor.Tensor) (compute.Weight, error) {
	if b.closed {
		return nil, &OpError{Op: "Load", Err: ErrClosed}
	}
	reject := func(format string, args ...any) (compute.Weight, error) {
		return nil, &LoadError{Tensor: t.Name, Reason: fmt.Sprintf(format, args...)}
	}
	if int(t.DType) >= len(b.k.expand) || b.k.expand[t.DType] == nil {
		return reject("element type %v cannot be multiplied; convert the checkpoint to f32, f16, bf16, q8_0, q4_0, q4_1, q5_0 or q5_1", t.DType)
	}
	if len(t.Shape) == 0 {
		return reject("a weight needs at least one dimension")
	}
	elements := 1
	for _, d := range t.Shape {
		if d <= 0 || d > math.MaxInt32 || elements > math.MaxInt/16/d {
			return reject("shape %v is empty or too large", t.Shape)
		}
		elements *= d
	}
	w := &weight{dtype: t.DType, rows: t.Rows(), cols: t.Cols(), data: t.Data}
	if w.cols%t.DType.BlockElements() != 0 {
		return reject("rows of %d elements do not divide into %v blocks of %d", w.cols, t.DType, t.DType.BlockElements())
	}
	row := t.DType.RowBytes(w.cols)
	w.rowBytes = row
	if t.Pitch != 0 {
		w.rowBytes = t.Pitch
	}
	if w.rowBytes < row || w.rowBytes > math.MaxInt32 {
		return reject("rows of %d bytes cannot be %d bytes apart", row, w.rowBytes)
	}
	if want := (w.rows-1)*w.rowBytes + row; len(t.Data) != want {
		return reject("shape %v in %v needs %d bytes, the file gives %d", t.Shape, t.DType, want, len(t.Data))
	}
	if len(t.Shape) == 1 {
		w.vector = make([]float32, w.cols)
		b.k.expand[w.dtype](&w.vector[0], 0, w.row(0), 0, 1, w.cols)
	}
	return w, nil
}

// ropeShape describes a table that holds, for each position, cos of every pair and then sin of every pair.
type ropeShape struct {
	pairs, positions int
	interleaved      bool
}

// Rope computes the table in float64 and rounds once. Frequencies are radians a position.
func (b *Backend) Rope(frequencies []float64, scale float32, interleaved bool, maxPositions int) (compute.Buffer, error) {
	if b.closed {
		return nil, &OpError{Op: "Rope", Err: ErrClosed}
	}
	pairs := len(frequencies)
	if pairs == 0 || maxPositions <= 0 || maxPositions > math.MaxInt32/pairs {
		return nil, &OpError{Op: "Rope", Reason: fmt.Sprintf("%d frequencies and %d positions", pairs, maxPositions)}
	}
	mem, err := b.Alloc(maxPositions * pairs * 8)
	if err != nil {
		return nil, err
	}
	table := mem.(*buffer)
	table.rope = &ropeShape{pairs: pairs, positions: maxPositions, interleaved: interleaved}
	out := unsafe.Slice(table.at(0), maxPositions*pairs*2)
	for p := range maxPositions {
		row := out[p*2*pairs : (p+1)*2*pairs]
		for i, f := range frequencies {
			sin, cos := math.Sincos(float64(p) * f)
			row[i] = float32(cos * float64(scale))
			row[pairs+i] = float32(sin * float64(scale))
		}
	}
	return mem, nil
}
