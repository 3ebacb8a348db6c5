package engine

import (
	"encoding/binary"
	"fmt"

	"github.com/cespare/xxhash/v2"

	"baton/compute"
	"baton/handoff"
)

// checksumBytes is the size of an xxHash64.
const checksumBytes = 8

// checksums are those of a pool's blocks: one for each tile of compute.Tile tokens of a head, as the tiles
// follow each other in a block. A tile is contiguous on every rank that holds its head, so however a block is
// split over ranks, the checksums of what a rank holds are moved like what it holds.
type checksums struct {
	kv    compute.KV // the layout
	data  []byte     // of the blocks
	sums  []byte     // of the checksums
	tile  int        // bytes
	tiles int        // in a block
}

// newChecksums splits a rank's memory into the blocks and, behind them, their checksums.
func newChecksums(kv compute.KV, memory []byte) checksums {
	blocks := kv.Blocks * kv.BlockBytes()
	s := checksums{kv: kv, data: memory[:blocks], sums: memory[blocks:]}
	s.tile = s.kv.DType.RowBytes(compute.Tile * s.kv.HeadDim)
	s.tiles = s.kv.BlockBytes() / s.tile
	return s
}

func (c Config) verifies() bool { return c.VerifyHandoff != handoff.VerifyOff }

// each visits the tiles of blocks, each with the place of its checksum, until visit reports false.
func (s checksums) each(blocks []int32, visit func(block int32, tile int, data, sum []byte) bool) {
	for _, id := range blocks {
		for i := range s.tiles {
			n := int(id)*s.tiles + i
			if !visit(id, i, s.data[n*s.tile:][:s.tile], s.sums[n*checksumBytes:][:checksumBytes]) {
				return
			}
		}
	}
}

// seal makes the checksums of blocks.
func (s checksums) seal(blocks []int32) {
	s.each(blocks, func(_ int32, _ int, data, sum []byte) bool {
		binary.LittleEndian.PutUint64(sum, xxhash.Sum64(data))
		return true
	})
}

// verify compares blocks with their checksums. The error is a *ChecksumError for the first that differs.
func (s checksums) verify(blocks []int32) (err error) {
	s.each(blocks, func(block int32, tile int, data, sum []byte) bool {
		if have, want := xxhash.Sum64(data), binary.LittleEndian.Uint64(sum); have != want {
			err = s.fault(block, tile, have, want)
		}
		return err == nil
	})
	return err
}

func (s checksums) fault(block int32, tile int, have, want uint64) *ChecksumError {
	perHead := s.kv.BlockSize / compute.Tile
	head := tile / perHead
	plane := head / s.kv.Heads
	return &ChecksumError{
		Block: block, Layer: plane / s.kv.Planes, Planes: s.kv.Planes, Plane: plane % s.kv.Planes, Head: head % s.kv.Heads, Token: tile % perHead * compute.Tile,
		Have: have, Want: want,
	}
}

// ChecksumError says that a part of a KV block is not what its source sealed.
type ChecksumError struct {
	Block              int32 // of the pool
	Planes             int   // a layer's: 2, or 1 of a latent cache
	Layer, Plane, Head int   // of two planes 0 holds keys, 1 values
	Token              int   // within the block: the first of the compute.Tile ones that are affected
	Have, Want         uint64
}

func (e *ChecksumError) Error() string {
	what := [...]string{"keys", "values"}[e.Plane]
	if e.Planes == 1 {
		what = "latents"
	}
	return fmt.Sprintf("the %s of layer %d, head %d, tokens %d to %d of block %d have checksum %016x; the source made it %016x",
		what, e.Layer, e.Head, e.Token, e.Token+compute.Tile-1, e.Block, e.Have, e.Want)
}
