package kvcache

// leafHeap orders the evictable leaves by (tick of last use, id): the least recently used one is first.
type leafHeap []int32

func (h leafHeap) min() int32 { return h[0] }

func (h leafHeap) less(p *Pool, i, j int) bool {
	a, b := &p.blocks[h[i]], &p.blocks[h[j]]
	if a.used != b.used {
		return a.used < b.used
	}
	return h[i] < h[j]
}

func (h leafHeap) set(p *Pool, i int, id int32) {
	h[i] = id
	p.blocks[id].leaf = int32(i)
}

func (h *leafHeap) add(p *Pool, id int32) {
	*h = append(*h, id)
	h.set(p, len(*h)-1, id)
	h.up(p, len(*h)-1)
}

// remove takes a block out, if it is in.
func (h *leafHeap) remove(p *Pool, id int32) {
	i := int(p.blocks[id].leaf)
	if i == none {
		return
	}
	last := len(*h) - 1
	moved := (*h)[last]
	*h = (*h)[:last]
	p.blocks[id].leaf = none
	if i == last {
		return
	}
	h.set(p, i, moved)
	h.up(p, i)
	h.down(p, int(p.blocks[moved].leaf))
}

func (h leafHeap) up(p *Pool, i int) {
	for i > 0 {
		parent := (i - 1) / 2
		if !h.less(p, i, parent) {
			return
		}
		h.swap(p, i, parent)
		i = parent
	}
}

func (h leafHeap) down(p *Pool, i int) {
	for {
		child := 2*i + 1
		if child >= len(h) {
			return
		}
		if child+1 < len(h) && h.less(p, child+1, child) {
			child++
		}
		if !h.less(p, child, i) {
			return
		}
		h.swap(p, i, child)
		i = child
	}
}

func (h leafHeap) swap(p *Pool, i, j int) {
	a, b := h[i], h[j]
	h.set(p, i, b)
	h.set(p, j, a)
}
