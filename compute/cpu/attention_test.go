package cpu

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"

	"baton/compute"
	"baton/tensor"
)

// attentionCase is a batch of sequences over one cache.
type attentionCase struct {
	heads, group, dim int
	dtype             tensor.DType
	lengths           []int // tokens of each sequence
}

// run stores every sequence's keys and values, attends in chunks of the given number of rows, and
// returns all rows' results, sequence by sequence. What the cache holds beside them is NaN.
func (c attentionCase) run(t *testing.T, b *Backend, blockSize, chunk int, together bool) []float32 {
	t.Helper()
	kv, tables := c.cache(t, b, blockSize)
	width := c.heads * c.group * c.dim
	const layer, scale = 1, 0.3
	done := make([]int, len(c.lengths))
	out := make([][]float32, len(c.lengths))
	for {
		var seqs []compute.Sequence
		var q, k, v []float32
		var slots []int32
		rows := 0
		for i, n := range c.lengths {
			count := min(chunk, n-done[i])
			if count == 0 || !together && len(seqs) > 0 {
				continue
			}
			seqs = append(seqs, compute.Sequence{Row: rows, Rows: count, Position: done[i], Blocks: tables[i]})
			for p := done[i]; p < done[i]+count; p++ {
				seed := uint64(1000*i + p)
				q = append(q, random(3*seed, width)...)
				k = append(k, random(3*seed+1, c.heads*c.dim)...)
				v = append(v, random(3*seed+2, c.heads*c.dim)...)
				slots = append(slots, tables[i][p/blockSize]*int32(blockSize)+int32(p%blockSize))
			}
			rows += count
		}
		if rows == 0 {
			break
		}
		b.StoreKV(kv, layer, put(t, b, k, c.heads*c.dim), put(t, b, v, c.heads*c.dim), slots)
		dst := blank(t, b, rows, width, width+1)
		b.Attention(dst, put(t, b, q, width), kv, layer, seqs, scale)
		got := get(t, b, dst)
		for _, s := range seqs {
			for i := range tables {
				if &tables[i][0] == &s.Blocks[0] {
					out[i] = append(out[i], got[s.Row*width:(s.Row+s.Rows)*width]...)
					done[i] += s.Rows
				}
			}
		}
	}
	var all []float32
	for _, o := range out {
		all = append(all, o...)
	}
	return all
}

// cache makes a pool full of NaN and scattered block tables.
func (c attentionCase) cache(t *testing.T, b *Backend, blockSize int) (compute.KV, [][]int32) {
	t.Helper()
	need := 0
	for _, n := range c.lengths {
		need += (n + blockSize - 1) / blockSize
	}
	kv := compute.KV{Blocks: need + 3, Layers: 2, Heads: c.heads, HeadDim: c.dim, BlockSize: blockSize, DType: c.dtype}
	buf, err := b.Alloc(kv.Blocks * kv.BlockBytes())
	if err != nil {
		t.Fatal(err)
	}
	kv.Buf = buf
	for i := range buf.(*buffer).data {
		buf.(*buffer).data[i] = 0xff
	}
	ids := rand.New(rand.NewPCG(9, 9)).Perm(kv.Blocks)
	tables := make([][]int32, len(c.lengths))
	for i, n := range c.lengths {
		for range (n + blockSize - 1) / blockSize {
			tables[i] = append(tables[i], int32(ids[0]))
			ids = ids[1:]
		}
	}
	return kv, tables
}

// reference is softmax attention in float64.
func (c attentionCase) reference() (want, bound []float64) {
	width := c.heads * c.group * c.dim
	round := func(v []float32) []float32 {
		if c.dtype == tensor.BF16 {
			for i := range v {
				v[i] = tensor.BF16ToF32(tensor.F32ToBF16(v[i]))
			}
		}
		return v
	}
	for i, n := range c.lengths {
		var ks, vs [][]float32
		for p := range n {
			seed := uint64(1000*i + p)
			q := random(3*seed, width)
			ks = append(ks, round(random(3*seed+1, c.heads*c.dim)))
			vs = append(vs, round(random(3*seed+2, c.heads*c.dim)))
			for h := range c.heads * c.group {
				kvHead := h / c.group
				sum, out := 0.0, make([]float64, c.dim)
				for j := range ks {
					s := 0.0
					for d := range c.dim {
						s += float64(q[h*c.dim+d]) * float64(ks[j][kvHead*c.dim+d])
					}
					w := math.Exp(s * 0.3)
					sum += w
					for d := range c.dim {
						out[d] += w * float64(vs[j][kvHead*c.dim+d])
					}
				}
				for d := range c.dim {
					want, bound = append(want, out[d]/sum), append(bound, 1)
				}
			}
		}
	}
	return want, bound
}

func TestAttention(t *testing.T) {
	cases := []attentionCase{
		{heads: 3, group: 3, dim: 64, lengths: []int{37, 1, 70}},
		{heads: 1, group: 8, dim: 128, lengths: []int{19, 33}},
		{heads: 2, group: 1, dim: 80, lengths: []int{50}},
		{heads: 2, group: 2, dim: 96, lengths: []int{18, 16, 17}},
		{heads: 1, group: 5, dim: 16, lengths: []int{65}},
		{heads: 2, group: 60, dim: 8, lengths: []int{20}},
		{heads: 2, group: 2, dim: 10, lengths: []int{20, 5}},
	}
	for _, c := range cases {
		for _, d := range []tensor.DType{tensor.F32, tensor.BF16} {
			c.dtype = d
			name := fmt.Sprintf("%d×%d heads of %d, %v", c.heads, c.group, c.dim, d)
			first := c.run(t, open(t, setups[1]), 16, 1000, true)
			want, bound := c.reference()
			near(t, name, first, want, bound, 4e-6)
			for i, o := range setups {
				b := open(t, o)
				sizes := []int{16, 32, 64}
				if o.Portable { // slow, so not every combination
					sizes = sizes[i%3 : i%3+1]
				}
				for _, blockSize := range sizes {
					chunk := []int{1, 5, 16, 1000}[(i+blockSize/16)%4]
					got := c.run(t, b, blockSize, chunk, (i+blockSize)%3 > 0)
					sameBits(t, fmt.Sprintf("%s, blocks of %d, chunks of %d, %v", name, blockSize, chunk, o), got, first)
				}
			}
		}
	}
}

// TestStoreKV checks the layout byte by byte: [block][layer][plane][head][token][dim].
func TestStoreKV(t *testing.T) {
	for _, d := range []tensor.DType{tensor.F32, tensor.BF16} {
		for _, o := range setups {
			b := open(t, o)
			kv := compute.KV{Blocks: 3, Layers: 2, Heads: 2, HeadDim: 20, BlockSize: 16, DType: d}
			mem := make([]uint64, kv.Blocks*kv.BlockBytes()/8)
			data := unsafe.Slice((*byte)(unsafe.Pointer(&mem[0])), 8*len(mem))
			buf, err := b.Wrap(data)
			if err != nil {
				t.Fatal(err)
			}
			kv.Buf = buf
			k, v := random(5, 2*40), random(6, 2*40)
			k[3], k[4], v[7] = float32(math.NaN()), float32(math.Inf(-1)), math.MaxFloat32
			b.StoreKV(kv, 1, put(t, b, k, 40), put(t, b, v, 40), []int32{2*16 + 5, 7})
			if err := b.Read(nil, compute.Mat{Buf: buf, Cols: 1}); err != nil {
				t.Fatal(err)
			}
			for row, slot := range []struct{ block, token int }{{2, 5}, {0, 7}} {
				for plane, src := range [][]float32{k, v} {
					for h := range 2 {
						at := (((slot.block*2+1)*2+plane)*2+h)*16*20 + slot.token*20
						want := make([]byte, d.RowBytes(20))
						if err := tensor.Quantize(want, d, src[row*40+h*20:][:20]); err != nil {
							t.Fatal(err)
						}
						got := data[d.RowBytes(at):][:len(want)]
						if string(got) != string(want) {
							t.Fatalf("%v %v: row %d plane %d head %d holds %x, want %x", d, o, row, plane, h, got, want)
						}
						clear(got)
					}
				}
			}
			for i, x := range data {
				if x != 0 {
					t.Fatalf("%v: byte %d was written", d, i)
				}
			}
		}
	}
}
