package kvcache

import (
	"encoding/hex"
	"testing"
)

func sequence(n int) []int32 {
	ids := make([]int32, n)
	for i := range ids {
		ids[i] = int32(i)
	}
	return ids
}

// The expected digests were computed with Python's hashlib and struct.pack("<q").
func TestChainVectors(t *testing.T) {
	tests := []struct {
		name      string
		root      Digest
		blockSize int
		tokens    []int32
		want      []string
		public    []uint64
	}{
		{name: "empty", blockSize: 4},
		{name: "shorter than a block", blockSize: 4, tokens: sequence(3)},
		{name: "two blocks and a tail", blockSize: 4, tokens: sequence(10), want: vectorPlain[:], public: vectorPublic[:]},
		{name: "negative and large ids", blockSize: 2, tokens: []int32{-1, 1<<31 - 1}, want: vectorSigned[:]},
		{name: "salt", root: Root("tenant", ""), blockSize: 4, tokens: sequence(4), want: vectorSalted[:]},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := Chain(tt.root, tt.blockSize, tt.tokens)
			if len(got) != len(tt.want) {
				t.Fatalf("%d digests, want %d", len(got), len(tt.want))
			}
			for i, d := range got {
				if h := hex.EncodeToString(d[:]); h != tt.want[i] {
					t.Errorf("digest %d is %s, want %s", i, h, tt.want[i])
				}
				if tt.public != nil && d.Public() != tt.public[i] {
					t.Errorf("public number %d is %d, want %d", i, d.Public(), tt.public[i])
				}
			}
		})
	}
}

func TestPublicRange(t *testing.T) {
	low := Digest{}
	if got := low.Public(); got != 1 {
		t.Errorf("zero digest: %d, want 1", got)
	}
	high := Digest{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	if got := high.Public(); got != 2 {
		t.Errorf("2^64-1 mod 2^63-1 + 1: %d, want 2", got)
	}
	most := Digest{0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f}
	if got := most.Public(); got != 1<<63-1 {
		t.Errorf("2^63-2: %d, want 2^63-1", got)
	}
}

func TestChainTellsApart(t *testing.T) {
	base := sequence(8)
	repeated := Chain(Digest{}, 2, []int32{5, 6, 5, 6})
	if repeated[0] == repeated[1] {
		t.Error("two equal blocks in a row have one digest")
	}
	// What collided in a polynomial hash with base 31.
	for j := range len(base) - 1 {
		other := append([]int32(nil), base...)
		other[j] += 31
		other[j+1] -= 1
		if Chain(Digest{}, 8, other)[0] == Chain(Digest{}, 8, base)[0] {
			t.Errorf("swap at %d collides", j)
		}
	}
	roots := map[Digest]string{}
	for _, r := range [][2]string{{"", ""}, {"ab", ""}, {"", "ab"}, {"a", "b"}, {"ab", "c"}, {"a", "bc"}} {
		d := Root(r[0], r[1])
		if other, ok := roots[d]; ok {
			t.Errorf("salt %q adapter %q shares its root with %s", r[0], r[1], other)
		}
		roots[d] = r[0] + "|" + r[1]
	}
}

func BenchmarkChain32k(b *testing.B) {
	tokens := sequence(32 << 10)
	b.SetBytes(int64(len(tokens)) * 8)
	for b.Loop() {
		Chain(Digest{}, 32, tokens)
	}
}

var (
	vectorPlain = [...]string{
		"9372cbe7347111c3b539a5d9e5c9728cb2590a25586024dde52ceb7ff338fa81",
		"f8fac076b3356df63148df9f74c3cffc5fec0a76848eac47488036f8a3fcfa52",
	}
	vectorPublic = [...]uint64{4832768347186360981, 8533535913844734714}
	vectorSigned = [...]string{
		"e2a8a05a5e1e32e21192529363db082d744ce17885c98bb4212f17cf4b4d6b66",
	}
	vectorSalted = [...]string{
		"10a8bdec4700b27cb66854d681b45985786e5f98abb900e4573450a15fc6b763",
	}
)
