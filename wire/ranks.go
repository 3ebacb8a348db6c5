package wire

//go:generate go tool msgp -io=false -tests=false -file=ranks.go -o=ranks_gen.go

//msgp:vartuple JoinShard ShardJoined RanksReady TPBroadcast StepDone StepLogits RankOrder RankEvent

// The headers of what goes between the processes of one shard. The one that has its first rank leads.
const (
	HeaderTPBroadcast Header = 80 // leader -> other processes
	HeaderJoinShard   Header = 82 // a process -> leader
	HeaderShardJoined Header = 83 // leader -> a process
	HeaderRanksReady  Header = 84 // a process -> leader
	HeaderStepDone    Header = 85 // a process -> leader
	HeaderStepLogits  Header = 86 // a process -> leader
	HeaderRankOrder   Header = 87 // leader -> a process
	HeaderRankEvent   Header = 88 // a process -> leader
)

// JoinShard offers to run ranks of a shard.
type JoinShard struct {
	Ranks []int
	Model string // fingerprint
}

// ShardJoined ends the wait for all ranks, or refuses a process with the reason. It says how to run them: what
// the processes must agree on is the leader's to choose.
type ShardJoined struct {
	Error  string
	Mesh   string // address at which the first rank expects the others
	Secret []byte // that they show each other

	Shard         string // its spec
	Role, Name    string
	BlockSize     int
	KVBytes       int64
	KVDType       string
	MaxRequests   int
	MaxTokens     int
	MaxSeqLen     int
	Logprobs      string
	Transport     string
	VerifyHandoff string
}

// RanksReady says that a process has loaded its ranks, or why it could not. Info i is that of rank Ranks[i].
type RanksReady struct {
	Error string
	Ranks []int
	Infos []RankInfo
}

// TPBroadcast is the step plan of one engine: the rows to compute, the sequences that they belong to, and where
// their KV goes.
type TPBroadcast struct {
	Sequence  uint64
	Engine    int // within the shard
	Tokens    Tokens
	Positions Tokens
	Slots     Tokens
	Logits    Tokens // rows whose logits are wanted
	Sequences Tokens // four numbers each: first row, rows, position, number of blocks
	Blocks    Tokens // of all sequences, one after the other
	Lockstep  Tokens // rows of the engines that step together
}

// StepDone is a rank's echo of a step: fingerprints of the plan that it executed and of the activations that it
// holds now.
type StepDone struct {
	Sequence uint64
	Engine   int
	Rank     int // within the engine
	Plan     uint64
	State    uint64
	Error    string
}

// StepLogits is one wanted row, from an engine's first rank.
type StepLogits struct {
	Sequence uint64
	Engine   int
	Row      int // which of the wanted ones
	Values   Floats
}

// RankOrder is one of the handoff's orders, to one rank. Kind says which, and which fields count.
type RankOrder struct {
	Engine, Rank int
	Kind         string
	Transfer     uint64
	Handoff      uint64
	Secret       []byte // a capability or a tag
	Peer         []byte
	Blocks       Tokens
	Extents      []byte // little-endian int64: offset and length, or source, destination and length, of each
}

// RankEvent is what an order came to, but for the end of a transfer, which is a KVHandoffComplete.
type RankEvent struct {
	Engine, Rank int
	Kind         string
	Transfer     uint64
	Handoff      uint64
	Tag          []byte
	Quiesced     bool
	Error        string
}
