package coordinator

import (
	"encoding/binary"
	"math/bits"
	"sync"

	"baton/kvcache"
	"baton/wire"
)

// chains makes the hash chains of prompts and remembers those of the latest ones: the turns of a conversation,
// and requests after one system prompt, begin alike, and comparing tokens takes a tenth of the time of hashing
// them. It is used by the goroutines of all connections.
type chains struct {
	mu        sync.Mutex
	blockSize int
	// starts finds a prompt by its first 1, 2, 4, 8… blocks, at the hash of these; a later prompt with the same
	// start, or the same hash, takes the place.
	starts []*chain
	recent []*chain // the oldest first
	tokens int      // of recent
}

// chain is a prompt, cut to whole blocks, and its digests. Neither changes.
type chain struct {
	root    kvcache.Digest
	prompt  wire.Tokens
	digests []kvcache.Digest
}

const (
	// chainTokens bounds the tokens that are remembered, to some 6 MB with their digests.
	chainTokens = 1 << 20
	// chainStarts is the number of places for starts, a power of two.
	chainStarts = 1 << 14
	// chainBlocks is how many blocks a prompt must have to be worth it.
	chainBlocks = 4
)

// of returns the digests of a prompt's complete blocks. Neither they nor the prompt may be changed any more.
func (c *chains) of(root kvcache.Digest, blockSize int, prompt wire.Tokens) []kvcache.Digest {
	n := len(prompt) / blockSize
	if n < chainBlocks || n*blockSize > chainTokens/2 {
		return kvcache.Chain(root, blockSize, prompt)
	}
	prompt = prompt[: n*blockSize : n*blockSize]
	var places [bits.UintSize]int
	starts := places[:bits.Len(uint(n))]
	hashStarts(starts, root, blockSize, prompt)

	known := c.longest(starts, root, blockSize, prompt)
	if len(known) == n {
		return known
	}
	digests := make([]kvcache.Digest, n)
	have := copy(digests, known)
	last := root
	if have > 0 {
		last = digests[have-1]
	}
	copy(digests[have:], kvcache.Chain(last, blockSize, prompt[have*blockSize:]))
	c.remember(starts, &chain{root, prompt, digests}, blockSize)
	return digests
}

// longest returns the digests of the longest start of a prompt that it finds, as many as are the prompt's too.
func (c *chains) longest(starts []int, root kvcache.Digest, blockSize int, prompt wire.Tokens) []kvcache.Digest {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.blockSize != blockSize {
		return nil
	}
	for i := len(starts) - 1; i >= 0; i-- {
		known := c.starts[starts[i]]
		if known == nil || known.root != root {
			continue
		}
		if n := common(known.prompt, prompt) / blockSize; n >= 1<<i {
			return known.digests[:n:n]
		}
	}
	return nil
}

func (c *chains) remember(starts []int, new *chain, blockSize int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.blockSize != blockSize {
		c.blockSize, c.recent, c.tokens = blockSize, nil, 0
		c.starts = make([]*chain, chainStarts)
	}
	for _, place := range starts {
		c.starts[place] = new
	}
	c.recent = append(c.recent, new)
	c.tokens += len(new.prompt)
	for c.tokens > chainTokens {
		c.tokens -= len(c.recent[0].prompt)
		*c.recent[0] = chain{} // places may still hold it
		c.recent[0], c.recent = nil, c.recent[1:]
	}
}

// common is the length of the start that two prompts share.
func common(a, b wire.Tokens) int {
	n := min(len(a), len(b))
	for i, id := range a[:n] {
		if id != b[i] {
			return i
		}
	}
	return n
}

// hashStarts sets places[i] to a hash of the first 2^i blocks. Whoever finds prompts of one hash makes them
// displace each other here, which costs as much as never to have sent them before.
func hashStarts(places []int, root kvcache.Digest, blockSize int, prompt wire.Tokens) {
	const odd = 0x9e3779b97f4a7c15
	fold := func(a, b uint64) uint64 {
		high, low := bits.Mul64(a, b)
		return high ^ low
	}
	h := binary.LittleEndian.Uint64(root[:]) ^ odd
	at := 0
	for i := range places {
		part := prompt[at : blockSize<<i]
		at = blockSize << i
		for ; len(part) >= 4; part = part[4:] {
			h = fold(h^pair(part[0], part[1]), odd^pair(part[2], part[3]))
		}
		for _, id := range part {
			h = fold(h^pair(id, 0), odd)
		}
		places[i] = int(h % chainStarts)
	}
}

func pair(a, b int32) uint64 { return uint64(uint32(a)) | uint64(uint32(b))<<32 }
