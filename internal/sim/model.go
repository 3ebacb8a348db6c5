package sim

import (
	"baton/engine"
	"baton/layout"
)

// The simulated model keeps a 64-bit tag for each token, layer and head where a real one keeps keys and
// values. As real KV does, a tag depends on all tokens before its own and on the weights, and the next
// token depends on every tag of the context: KV that is wrong, stale or somebody else's gives other tokens.
const (
	vocabulary = 1 << 30
	layers     = 2
	heads      = 4
	tagBytes   = 8
	maxSeqLen  = 64
	poison     = 0xdead_dead_dead_dead // what free memory holds
)

// geometry is that of the model's KV.
func geometry(blockSize int) layout.Geometry {
	return layout.Geometry{BlockSize: blockSize, Layers: layers, KVHeads: heads, HeadDim: 1, Planes: 1, ElementBytes: tagBytes}
}

// mix is the finalizer of splitmix64 over the sum of a and b.
func mix(a, b uint64) uint64 {
	x := a*0x9e3779b97f4a7c15 + b + 0x632be59bd9b4e019
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}

// reading is what a context comes to, folded in position after position.
type reading struct {
	last uint64 // of the position before the next
	all  uint64
}

// write is the tag of a token that follows a context, for one layer and head.
func (r reading) write(version uint64, token int32) uint64 {
	return mix(mix(r.last, uint64(token)), version)
}

func headTag(tag uint64, layer, head int) uint64 { return mix(tag, uint64(layer*heads+head)) }

// read folds in one position, whose tags were found in memory.
func (r *reading) read(tags *[layers * heads]uint64) {
	r.last = 0
	for _, tag := range tags {
		r.last = r.last*31 + tag
	}
	r.all = mix(r.all, r.last)
}

// follow folds in a token whose tags are as they should be.
func (r *reading) follow(version uint64, token int32) {
	var tags [layers * heads]uint64
	tag := r.write(version, token)
	for i := range tags {
		tags[i] = headTag(tag, i/heads, i%heads)
	}
	r.read(&tags)
}

// next is the token that follows a context.
func (r reading) next(version uint64) int32 { return int32(mix(r.all, version) % vocabulary) }

// logprob is of a prompt token, given the context before it.
func (r reading) logprob(target int32) float32 { return -float32(mix(r.all, uint64(target)) % 1000) }

// memory is the KV of one engine: the pool of each of its ranks.
type memory struct {
	blockSize int
	ranks     [][]uint64
	words     []int    // of a block on each rank
	sumsAt    []int    // the word from which on each rank keeps checksums; empty without
	sumWords  []int    // of a block's checksums
	homes     [][]home // of each layer's heads: several where ranks are replicas
}

// home is where a layer's head is kept: on which rank, and how far into a block.
type home struct{ rank, word int }

// newMemory makes the pools of an engine whose ranks hold what holdings say.
func newMemory(blockSize, blocks int, holdings []layout.Holding) *memory {
	g := geometry(blockSize)
	m := &memory{blockSize: blockSize, homes: make([][]home, layers*heads)}
	for rank, h := range holdings {
		words := int(g.BlockBytes(h) / tagBytes)
		pool := make([]uint64, blocks*words)
		for i := range pool {
			pool[i] = poison
		}
		m.ranks, m.words = append(m.ranks, pool), append(m.words, words)
		for layer := h.Layer; layer < h.Layer+h.Layers; layer++ {
			for head := h.Head; head < h.Head+h.Heads; head++ {
				at := home{rank, ((layer-h.Layer)*h.Heads + head - h.Head) * blockSize}
				m.homes[layer*heads+head] = append(m.homes[layer*heads+head], at)
			}
		}
	}
	return m
}

// scribble fills a block that nobody may read any more.
func (m *memory) scribble(id int32) {
	for rank, words := range m.words {
		pool := m.ranks[rank][int(id)*words:][:words]
		for i := range pool {
			pool[i] = poison
		}
	}
	m.scribbleSums(id)
}

// load reads the tags of a slot. Replicas must agree: if one does not, what is read is neither's.
func (m *memory) load(slot int, tags *[layers * heads]uint64) {
	block, offset := slot/m.blockSize, slot%m.blockSize
	for i, homes := range m.homes {
		for n, h := range homes {
			tag := m.ranks[h.rank][block*m.words[h.rank]+h.word+offset]
			if n == 0 {
				tags[i] = tag
			} else if tag != tags[i] {
				tags[i] = mix(tags[i], tag)
			}
		}
	}
}

func (m *memory) store(slot int, tag uint64) {
	block, offset := slot/m.blockSize, slot%m.blockSize
	for i, homes := range m.homes {
		for _, h := range homes {
			m.ranks[h.rank][block*m.words[h.rank]+h.word+offset] = headTag(tag, i/heads, i%heads)
		}
	}
}

// forward runs a pass: for each sequence in turn it reads the context, stores the tags of the new tokens
// and gives what the wanted rows ask for.
func (m *memory) forward(version uint64, p *engine.Plan) []engine.Output {
	outputs := make([]engine.Output, 0, len(p.Rows))
	next := 0 // of p.Rows
	var tags [layers * heads]uint64
	for _, seq := range p.Batch.Sequences {
		var r reading
		slot := func(position int) int {
			return int(seq.Blocks[position/m.blockSize])*m.blockSize + position%m.blockSize
		}
		for i := range seq.Position {
			m.load(slot(i), &tags)
			r.read(&tags)
		}
		for i := range seq.Rows {
			row := seq.Row + i
			m.store(int(p.Batch.Slots[row]), r.write(version, p.Batch.Tokens[row]))
			m.load(slot(seq.Position+i), &tags)
			r.read(&tags)
			if next < len(p.Rows) && int(p.Batch.Logits[next]) == row {
				out := engine.Output{Token: r.next(version)}
				if target := p.Rows[next].Target; target >= 0 {
					out = engine.Output{Token: target, Logprob: r.logprob(target)}
				}
				outputs = append(outputs, out)
				next++
			}
		}
	}
	return outputs
}

// prompt is the text of a request.
func (r Request) prompt() []int32 {
	tokens := make([]int32, 0, r.Shared+r.Own)
	for i := range r.Shared {
		tokens = append(tokens, int32(mix(uint64(r.Family), uint64(i))%vocabulary))
	}
	for i := range r.Own {
		tokens = append(tokens, int32(mix(uint64(1000+r.Tail), uint64(i))%vocabulary))
	}
	return tokens
}
