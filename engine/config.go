package engine

import (
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"slices"
	"time"

	"baton/checkpoint"
	"baton/compute"
	"baton/handoff"
	"baton/layout"
	"baton/mtls"
	"baton/tensor"
	"baton/tracing"
	"baton/wire"
)

// Config describes a shard's engines, one a data-parallel group. Zero fields take their defaults.
type Config struct {
	// Name tells the engine from the others of its coordinator ("prefill_s0"). Where there are several, each adds
	// its number ("prefill_s0_dp1").
	Name string
	// Placement says which of the ranks run in this process; nil is all of them.
	Placement *Placement
	// Shard is how many ranks there are and how they split the model. Default: one. Its role counts for nothing.
	Shard layout.Shard
	// Role is wire.RolePrefill, RoleDecode or RoleBoth.
	Role string
	// ServedModel is the name that clients use for the model.
	ServedModel string
	// Checkpoint holds the model. It must stay open as long as the engine.
	Checkpoint *checkpoint.Checkpoint

	// BlockSize is how many tokens a KV block holds: a multiple of compute.Tile. Default 32.
	BlockSize int
	// KVBytes is the size of the KV pool. Default: what MaxRequests sequences of MaxSeqLen take, at most
	// 2 GiB. Memory is only used as blocks are.
	KVBytes int64
	// KVType is F32 or BF16. Default: F32 for f32 checkpoints, else BF16.
	KVType tensor.DType
	// MaxRequests is the largest batch. Default 64.
	MaxRequests int
	// MaxTokens is the most rows of one pass, at least MaxRequests. Default 512.
	MaxTokens int
	// Continuation is how many KV blocks are set aside for a request's new tokens when it begins. More are
	// taken as they are needed: requests whose answers turn out long may wait for others, or be computed
	// again, but many more fit at once than if each had all it could ever need. Default 4; -1 sets all aside.
	Continuation int
	// Overtake is how many requests may begin before one that came earlier, because they have less to compute: what is cached
	// of their prompts counts. Default 0: first come, first served.
	Overtake int
	// MaxSeqLen is the longest sequence. Default and upper bound: what the model was made for.
	MaxSeqLen int
	// Threads is how many threads compute for an engine; its ranks share them, and each has one at least.
	// Default: one a core.
	Threads int
	// Transport moves KV between engines: "shm", "tcp" or "tcp-push". Default "shm".
	Transport string
	// TransferHost is the address at which other hosts reach this engine's data. Default 127.0.0.1.
	TransferHost string
	// TransferTLS, when set, is required of the peers of tcp and tcp-push.
	TransferTLS *mtls.Identity
	// VerifyHandoff says which blocks' checksums are compared after a handoff. All engines of a coordinator must
	// agree. Default handoff.VerifyOff; colocated engines hand nothing over.
	VerifyHandoff handoff.Verification
	// ExportLease is how long a prompt's KV waits for a decode engine, beginning anew whenever one says that it is
	// there. Default: for ever; a coordinator always says when an export is needed no more.
	ExportLease time.Duration
	// Logprobs says which distribution is reported. Default LogprobsRaw.
	Logprobs LogprobsMode

	Logger  *slog.Logger
	Metrics *Metrics        // nil for none
	Tracer  *tracing.Tracer // nil for none
}

// withDefaults fills in what is zero and checks the rest.
func (c Config) withDefaults() (Config, error) {
	if c.Checkpoint == nil {
		return c, errors.New("engine: Config.Checkpoint is missing")
	}
	spec := c.Checkpoint.Spec
	c.BlockSize = orElse(c.BlockSize, 32)
	c.MaxRequests = orElse(c.MaxRequests, 64)
	c.MaxTokens = orElse(c.MaxTokens, 512)
	c.Continuation = orElse(c.Continuation, 4)
	c.MaxSeqLen = orElse(c.MaxSeqLen, spec.MaxPositions)
	if p := c.Placement; p != nil {
		one := *p
		one.Host = orElse(one.Host, "127.0.0.1")
		if c.Placement = &one; len(one.Ranks) == 0 || !slices.IsSorted(one.Ranks) || !one.Leads() && c.Shard.TP == 0 {
			return c, fmt.Errorf("engine: Placement.Ranks is %v; it must be sorted, and begin with rank 0 where the shard is led", one.Ranks)
		}
	}
	c.Shard.TP, c.Shard.PP, c.Shard.DP = orElse(c.Shard.TP, 1), orElse(c.Shard.PP, 1), orElse(c.Shard.DP, 1)
	c.Shard.EP, c.Shard.ExpertTP = orElse(c.Shard.EP, 1), orElse(c.Shard.ExpertTP, c.Shard.TP)
	if err := c.Checkpoint.CheckShard(c.Shard); err != nil {
		return c, err
	}
	c.Threads = orElse(c.Threads, runtime.GOMAXPROCS(0))
	c.Transport = orElse(c.Transport, "shm")
	c.TransferHost = orElse(c.TransferHost, "127.0.0.1")
	c.Logprobs = orElse(c.Logprobs, LogprobsRaw)
	c.Role = orElse(c.Role, wire.RoleBoth)
	c.Name = orElse(c.Name, c.Role)
	if c.Role == wire.RoleBoth {
		c.VerifyHandoff = handoff.VerifyOff
	}
	var err error
	if c.VerifyHandoff, err = handoff.ParseVerification(string(c.VerifyHandoff)); err != nil {
		return c, err
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.KVType == tensor.Invalid {
		c.KVType = tensor.BF16
		if spec.WeightType == tensor.F32 {
			c.KVType = tensor.F32
		}
	}
	if c.KVBytes == 0 {
		blocks := int64(c.MaxRequests) * int64((c.MaxSeqLen+c.BlockSize-1)/c.BlockSize)
		c.KVBytes = min(blocks*c.blockBytes(), max(2<<30, c.blockBytes()))
	}
	return c, c.validate()
}

func orElse[T comparable](v, def T) T {
	var zero T
	if v == zero {
		return def
	}
	return v
}

func (c Config) validate() error {
	spec := c.Checkpoint.Spec
	switch {
	case !slices.Contains([]string{wire.RolePrefill, wire.RoleDecode, wire.RoleBoth}, c.Role):
		return fmt.Errorf("engine: --role is %q; it must be prefill, decode or both", c.Role)
	case c.BlockSize < compute.Tile || c.BlockSize%compute.Tile != 0:
		return fmt.Errorf("engine: --block-size is %d; it must be a multiple of %d", c.BlockSize, compute.Tile)
	case c.KVType != tensor.F32 && c.KVType != tensor.BF16:
		return fmt.Errorf("engine: KV type %s; it must be f32 or bf16", c.KVType)
	case c.MaxRequests < 1 || c.MaxTokens < c.MaxRequests:
		return fmt.Errorf("engine: %d tokens a step for up to %d requests; a step must hold a token of each (raise --max-tokens or lower --max-requests)", c.MaxTokens, c.MaxRequests)
	case c.MaxSeqLen < 2 || c.MaxSeqLen > spec.MaxPositions:
		return fmt.Errorf("engine: --max-seq-len is %d; the model serves 2 to %d", c.MaxSeqLen, spec.MaxPositions)
	case c.Overtake < 0:
		return fmt.Errorf("engine: --overtake is %d; it is a number of requests, or 0", c.Overtake)
	case c.Threads < 1:
		return fmt.Errorf("engine: --threads is %d; it must be 1 or more", c.Threads)
	case c.Logprobs != LogprobsRaw && c.Logprobs != LogprobsProcessed:
		return fmt.Errorf("engine: --logprobs is %q; it must be raw or processed", c.Logprobs)
	case c.ExportLease < 0:
		return fmt.Errorf("engine: an export lease of %v; it must be positive (--export-lease)", c.ExportLease)
	case c.blocks() < 1:
		return fmt.Errorf("engine: %d bytes of KV memory hold no block of %d tokens (%d bytes); raise --kv-memory", c.KVBytes, c.BlockSize, c.blockBytes())
	}
	return nil
}

// layout is the KV cache of the whole model.
func (c Config) layout() layout.Geometry {
	planes, heads, dim := c.Checkpoint.Spec.Cache()
	return layout.Geometry{
		BlockSize: c.BlockSize, Layers: c.Checkpoint.Spec.Layers, KVHeads: heads, HeadDim: dim, Planes: planes,
		ElementBytes: c.KVType.BlockBytes(),
	}
}

// checksumLayout is that of the checksums of its blocks.
func (c Config) checksumLayout() layout.Geometry { return c.layout().Checksums(compute.Tile) }

// holding is what of every block a rank holds.
func (c Config) holding(p layout.Part) layout.Holding {
	_, heads, _ := c.Checkpoint.Spec.Cache()
	return layout.Holding{Layer: p.Layer, Layers: p.Layers, Head: p.TPRank * heads / p.TP, Heads: max(heads/p.TP, 1)}
}

// holdings are those of an engine's ranks, stage by stage. The shard has been checked.
func (c Config) holdings() []layout.Holding {
	var list []layout.Holding
	for _, rank := range c.Shard.Group(0) {
		p, err := c.Shard.Part(rank, c.Checkpoint.Spec.Layers)
		if err != nil {
			panic(err) // CheckShard has compared the layers
		}
		list = append(list, c.holding(p))
	}
	return list
}

// kv is a rank's part of the pool, without a buffer.
func (c Config) kv(h layout.Holding) compute.KV {
	g := c.layout()
	return compute.KV{
		Layers: h.Layers, Planes: g.Planes, Heads: h.Heads, HeadDim: g.HeadDim, BlockSize: c.BlockSize, DType: c.KVType,
	}
}

// blockBytes is the size of a block on all ranks of an engine.
func (c Config) blockBytes() (n int64) {
	for _, h := range c.holdings() {
		n += c.layout().BlockBytes(h)
	}
	return n
}

func (c Config) blocks() int { return int(min(c.KVBytes/c.blockBytes(), 1<<30)) }

// geometry is what a peer must share to understand this engine's blocks.
func (c Config) geometry() wire.Geometry {
	spec, kv := c.Checkpoint.Spec, c.layout()
	return wire.Geometry{
		Model: c.Checkpoint.Fingerprint(), BlockSize: c.BlockSize, Layers: kv.Layers, KVHeads: kv.KVHeads,
		HeadDim: kv.HeadDim, Planes: kv.Planes, KVDType: c.KVType.String(), VocabSize: spec.VocabSize, MaxSeqLen: c.MaxSeqLen,
		VerifyHandoff: string(c.VerifyHandoff),
	}
}

// core is what the Core of an engine has to know, but for the transfers.
func (c Config) core() CoreConfig {
	spec := c.Checkpoint.Spec
	return CoreConfig{
		Name: c.Name, Role: c.Role, MaxRequests: c.MaxRequests, MaxTokens: c.MaxTokens, MaxSeqLen: c.MaxSeqLen,
		Vocabulary: spec.VocabSize, EOS: spec.EOS, BlockSize: c.BlockSize, Blocks: c.blocks(), Version: weightVersion,
		Continuation: max(c.Continuation, 0), Overtake: c.Overtake, Geometry: c.layout(), Holdings: c.holdings(), ChecksumTile: compute.Tile,
		ExportLease: c.ExportLease,
	}
}

func newIncarnation() uint64 { return rand.Uint64() | 1 }
