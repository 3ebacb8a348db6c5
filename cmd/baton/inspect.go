package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"

	"baton/checkpoint"
	"baton/compute"
	"baton/layout"
	"baton/tensor"
	"baton/wire"
)

// inspectCmd shows a model without serving it.
type inspectCmd struct {
	Model  string `arg:"" placeholder:"PATH" help:"Folder with config.json and safetensors, or a .gguf file."`
	Shards string `placeholder:"SPEC" help:"Also show what each rank of such shards would hold, or why the model cannot be split like that."`
	JSON   bool   `name:"json" help:"As JSON, with sizes in bytes and ranges as [first, end)."`
	kvFlags
}

// Help explains the table.
func (inspectCmd) Help() string {
	return `With --shards, one line a rank: its stage's layers, its share of the attention heads, of the KV heads
(which ranks share when there are fewer heads than ranks), of the experts and of the vocabulary, and the memory
that takes. KV is sized as an engine would with the same flags.`
}

// inspection is what inspect has to say.
type inspection struct {
	Path         string      `json:"path"`
	Family       string      `json:"family"`
	Parameters   int64       `json:"parameters"`
	Bytes        int64       `json:"bytes"`
	WeightType   string      `json:"weight_type"`
	Layers       int         `json:"layers"`
	HiddenSize   int         `json:"hidden_size"`
	Heads        int         `json:"heads"`
	KVHeads      int         `json:"kv_heads"` // of the cache
	Vocabulary   int         `json:"vocabulary"`
	MaxPositions int         `json:"max_positions"`
	Experts      int         `json:"experts,omitempty"`
	Shards       []shardPlan `json:"shards,omitempty"`
}

// shardPlan is what the ranks of a shard would hold.
type shardPlan struct {
	Spec      string     `json:"spec"`
	Role      string     `json:"role"`
	Engines   int        `json:"engines"`    // data-parallel groups, each with a KV cache of its own
	BlockSize int        `json:"block_size"` // tokens
	KVDType   string     `json:"kv_dtype"`
	Blocks    int        `json:"blocks"` // of each engine
	Ranks     []rankPlan `json:"ranks"`
}

// rankPlan is what one rank would hold. Spans are half-open.
type rankPlan struct {
	Rank         int     `json:"rank"`   // of the shard
	Engine       int     `json:"engine"` // data-parallel group
	Layers       span    `json:"layers"`
	Heads        span    `json:"heads"`
	KVHeads      span    `json:"kv_heads"`
	Experts      *span   `json:"experts,omitempty"`      // of the layers that have some
	ExpertSlice  *[2]int `json:"expert_slice,omitempty"` // which of how many slices of each
	Vocabulary   *span   `json:"vocabulary,omitempty"`   // of the first and the last stage
	WeightBytes  int64   `json:"weight_bytes"`
	KVBlockBytes int64   `json:"kv_block_bytes"`
	KVBytes      int64   `json:"kv_bytes"`
}

// span is [first, end).
type span [2]int

func (s span) String() string {
	if s[1]-s[0] == 1 {
		return fmt.Sprint(s[0])
	}
	return fmt.Sprintf("%d-%d", s[0], s[1]-1)
}

func (c *inspectCmd) Run(env *environment) error {
	m, err := modelFlags{Model: c.Model}.open(env.log)
	if err != nil {
		return err
	}
	defer m.Close()
	s := m.Spec
	_, cacheHeads, _ := s.Cache()
	found := inspection{
		Path: c.Model, Family: s.Family, Parameters: m.Parameters(), Bytes: m.Bytes(), WeightType: s.WeightType.String(),
		Layers: s.Layers, HiddenSize: s.HiddenSize, Heads: s.Heads, KVHeads: cacheHeads, Vocabulary: s.VocabSize,
		MaxPositions: s.MaxPositions, Experts: s.Experts.Count,
	}
	if c.Shards != "" {
		if found.Shards, err = c.plan(m.Checkpoint); err != nil {
			return err
		}
	}
	if c.JSON {
		out := json.NewEncoder(env.stdout)
		out.SetIndent("", "  ")
		return out.Encode(found)
	}
	fmt.Fprintf(env.stdout, "%s\n  family        %s\n  parameters    %d in %s (%s)\n  layers        %d, hidden %d, MLP %d\n"+
		"  attention     %s\n  vocabulary    %d\n  context       %d tokens\n",
		c.Model, s.Family, found.Parameters, humanBytes(found.Bytes), s.WeightType, s.Layers, s.HiddenSize, s.Intermediate,
		attentionLine(s), s.VocabSize, s.MaxPositions)
	if e := s.Experts; e.Count > 0 {
		fmt.Fprintf(env.stdout, "  experts       %d of %d a token, MLP %d", e.TopK, e.Count, e.Intermediate)
		if e.Shared > 0 {
			fmt.Fprintf(env.stdout, ", shared MLP %d", e.Shared)
		}
		fmt.Fprintln(env.stdout)
	}
	for i, p := range found.Shards {
		if err := p.print(env.stdout, i); err != nil {
			return err
		}
	}
	return nil
}

func attentionLine(s checkpoint.Spec) string {
	if _, _, cached := s.Cache(); s.Latent.Rank > 0 {
		return fmt.Sprintf("%d heads of dimension %d, values %d, over a latent of %d; %d numbers a token and layer in the cache",
			s.Heads, s.HeadDim, s.Latent.Value, s.Latent.Rank, cached)
	}
	return fmt.Sprintf("%d heads, %d KV heads, head dimension %d", s.Heads, s.KVHeads, s.HeadDim)
}

// plan sizes the ranks of all shards, or says what serve would refuse; but for their number, which several processes
// can share.
func (c *inspectCmd) plan(ck *checkpoint.Checkpoint) (plans []shardPlan, err error) {
	shards, err := layout.ParseShards(c.Shards)
	if err != nil {
		return nil, fmt.Errorf("--shards: %w", err)
	}
	for i, s := range shards {
		if s.Ranks() > maxShardRanks {
			return nil, fmt.Errorf("--shards: shard %d: %d ranks (tp·pp·dp); at most %d", i, s.Ranks(), maxShardRanks)
		}
		if err := ck.CheckShard(s); err != nil {
			return nil, fmt.Errorf("--shards: shard %d: %w", i, err)
		}
		p, err := c.kvFlags.plan(ck, s)
		if err != nil {
			return nil, fmt.Errorf("--shards: shard %d: %w", i, err)
		}
		plans = append(plans, p)
	}
	return plans, nil
}

// plan sizes the ranks of a shard that fits the model.
func (f kvFlags) plan(ck *checkpoint.Checkpoint, s layout.Shard) (shardPlan, error) {
	kvType, longest := f.dtype(ck.Spec), cmp.Or(f.MaxSeqLen, ck.Spec.MaxPositions)
	planes, heads, dim := ck.Spec.Cache()
	g := layout.Geometry{
		BlockSize: f.BlockSize, Layers: ck.Spec.Layers, KVHeads: heads, HeadDim: dim, Planes: planes, ElementBytes: kvType.BlockBytes(),
	}
	stages, err := s.StageLayers(g.Layers)
	if err != nil {
		return shardPlan{}, err
	}
	holdings, err := g.Holdings(s.TP, stages)
	if err != nil {
		return shardPlan{}, err
	}
	var block int64 // on all ranks of an engine
	for _, h := range holdings {
		block += g.BlockBytes(h)
	}
	blocks := f.blocks(block, longest)
	switch {
	case f.BlockSize%compute.Tile != 0:
		return shardPlan{}, fmt.Errorf("--block-size is %d; it must be a multiple of %d", f.BlockSize, compute.Tile)
	case longest < 2 || longest > ck.Spec.MaxPositions:
		return shardPlan{}, fmt.Errorf("--max-seq-len is %d; the model serves 2 to %d", longest, ck.Spec.MaxPositions)
	case blocks < 1:
		return shardPlan{}, fmt.Errorf("%d bytes of KV memory hold no block of %d tokens (%d bytes); raise --kv-memory", f.KVMemory, f.BlockSize, block)
	}
	p := shardPlan{
		Role: cmp.Or(s.Role, wire.RoleBoth), Engines: s.DP, BlockSize: f.BlockSize, KVDType: kvType.String(), Blocks: blocks,
		Ranks: make([]rankPlan, s.Ranks()),
	}
	s.Role = ""
	p.Spec = s.String()
	for dp := range s.DP {
		for i, rank := range s.Group(dp) {
			if p.Ranks[rank], err = planRank(ck, s, rank); err != nil {
				return shardPlan{}, err
			}
			r, h := &p.Ranks[rank], holdings[i]
			r.KVHeads = span{h.Head, h.Head + h.Heads}
			r.KVBlockBytes = g.BlockBytes(h)
			r.KVBytes = int64(blocks) * r.KVBlockBytes
		}
	}
	return p, nil
}

// blocks is how many KV blocks an engine has.
func (f kvFlags) blocks(block int64, longest int) int {
	memory := int64(f.KVMemory)
	if memory == 0 {
		memory = min(int64(f.MaxRequests)*int64((longest+f.BlockSize-1)/f.BlockSize)*block, max(2<<30, block))
	}
	return int(min(memory/block, 1<<30))
}

func (f kvFlags) dtype(s checkpoint.Spec) tensor.DType {
	switch t := kvTypes[f.KVDtype]; {
	case t != tensor.Invalid:
		return t
	case s.WeightType == tensor.F32:
		return tensor.F32
	}
	return tensor.BF16
}

// planRank is a rank's part of the weights.
func planRank(ck *checkpoint.Checkpoint, s layout.Shard, rank int) (rankPlan, error) {
	part, err := s.Part(rank, ck.Spec.Layers)
	if err != nil {
		return rankPlan{}, err
	}
	of := func(n, parts, i int) span {
		from, to := tensor.Slice(n, parts, i)
		return span{from, to}
	}
	weights := ck.Shard(part)
	r := rankPlan{
		Rank: rank, Engine: s.Place(rank).DP, Layers: span{part.Layer, part.Layer + part.Layers},
		Heads: of(ck.Spec.Heads, part.TP, part.TPRank), WeightBytes: weights.Bytes(),
	}
	if part.First() || part.Last() {
		vocabulary := of(ck.Spec.VocabSize, part.TP, part.TPRank)
		r.Vocabulary = &vocabulary
	}
	for layer := part.Layer; layer < part.Layer+part.Layers; layer++ {
		if ck.Spec.Sparse(layer) {
			experts := of(ck.Spec.Experts.Count, part.EP, part.EPRank)
			r.Experts, r.ExpertSlice = &experts, &[2]int{part.ExpertTPRank, part.ExpertTP}
		}
	}
	return r, nil
}

// print writes a table of the ranks.
func (p shardPlan) print(out io.Writer, number int) error {
	engines := "1 engine"
	if p.Engines > 1 {
		engines = fmt.Sprintf("%d engines", p.Engines)
	}
	fmt.Fprintf(out, "\nshard %d: %s (%s): %s of %d ranks; %d KV blocks of %d tokens (%s) an engine, %d tokens in all\n",
		number, p.Spec, p.Role, engines, len(p.Ranks)/p.Engines, p.Blocks, p.BlockSize, p.KVDType, p.Blocks*p.BlockSize)
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	sparse := false
	for _, r := range p.Ranks {
		sparse = sparse || r.Experts != nil
	}
	column := func(title string) string {
		if sparse {
			return title + "\t"
		}
		return ""
	}
	fmt.Fprintf(table, "rank\tengine\tlayers\theads\tKV heads\t%svocabulary\tweights\tKV a block\tKV\n", column("experts"))
	for _, r := range p.Ranks {
		experts, vocabulary := "-", "-"
		if r.Experts != nil {
			experts = r.Experts.String()
			if r.ExpertSlice[1] > 1 {
				experts += fmt.Sprintf(" (slice %d of %d)", r.ExpertSlice[0]+1, r.ExpertSlice[1])
			}
		}
		if r.Vocabulary != nil {
			vocabulary = r.Vocabulary.String()
		}
		fmt.Fprintf(table, "%d\t%d\t%v\t%v\t%v\t%s%s\t%s\t%s\t%s\n", r.Rank, r.Engine, r.Layers, r.Heads, r.KVHeads,
			column(experts), vocabulary, humanBytes(r.WeightBytes), humanBytes(r.KVBlockBytes), humanBytes(r.KVBytes))
	}
	return table.Flush()
}
