// Package kvcache keeps the books of a paged key/value cache: which block belongs to whom, which blocks
// hold a prefix that somebody else can use, and how many may still be handed out. It knows block ids and
// token ids; it never sees the bytes of a block, a clock, a socket or a random source.
//
// A Pool owns the blocks. A request opens a Table, which matches the longest cached prefix of its prompt
// and reserves all that it can ever need, so that it never runs out, or less, so that more requests run at
// once; then Fit tells which of them have to make room for the others. Whoever must keep blocks longer
// than their request (an export, a quarantine) takes a Pin. A Pool and all that comes from it are used by
// one goroutine at a time.
package kvcache

import (
	"crypto/sha256"
	"encoding/binary"
)

// Digest names a prefix: a block's tokens and all those before it.
type Digest [sha256.Size]byte

// Key is what a cached block is found by. KV made under other weights has another Version, so it never
// matches.
type Key struct {
	Version uint64
	Digest  Digest
}

// Root is the digest that precedes the first block: zero bytes, or, with a cache salt or an adapter, the
// SHA-256 of both, each after its length in bytes as a little-endian uint64.
func Root(salt, adapter string) Digest {
	if salt == "" && adapter == "" {
		return Digest{}
	}
	var b []byte
	for _, s := range [...]string{salt, adapter} {
		b = binary.LittleEndian.AppendUint64(b, uint64(len(s)))
		b = append(b, s...)
	}
	return sha256.Sum256(b)
}

// Chain returns the digests of the complete blocks of tokens, in order: SHA-256 of the previous digest
// and the block's token ids as little-endian int64.
func Chain(root Digest, blockSize int, tokens []int32) []Digest {
	n := len(tokens) / blockSize
	digests := make([]Digest, n)
	buf := make([]byte, 0, len(root)+8*blockSize)
	for i := range digests {
		root = extend(buf, root, tokens[i*blockSize:(i+1)*blockSize])
		digests[i] = root
	}
	return digests
}

// extend is one link of the chain. buf is scratch space.
func extend(buf []byte, previous Digest, block []int32) Digest {
	buf = append(buf[:0], previous[:]...)
	for _, id := range block {
		buf = binary.LittleEndian.AppendUint64(buf, uint64(int64(id)))
	}
	return sha256.Sum256(buf)
}

// Public is the digest's short form in [1, 2^63-1], for wires that carry a signed 64-bit number. It is
// not a key: two prefixes can share it.
func (d Digest) Public() uint64 {
	return binary.LittleEndian.Uint64(d[:8])%(1<<63-1) + 1
}
