// Package wire is the control plane's language: the messages that coordinators, engines and clients
// exchange, their msgpack form, and the framing that carries them. It carries ids, addresses, layouts,
// tokens and verdicts, never tensors.
//
// A frame is a little-endian uint32 length and so many bytes of msgpack: the array [header, [fields...]].
// Field arrays may be longer or shorter than a reader expects: unknown trailing fields are skipped and
// missing ones are zero, so that versions can grow; new fields go to the end of a struct. A message of an
// unknown header arrives as Unknown. Nil and empty strings, lists and byte strings are the same.
//
// Conn carries messages over any net.Conn. The Connect that opens a connection names the sender's
// incarnation, and every later message of that connection belongs to it: a process that comes back
// opens another connection, and the old one is closed.
package wire

//go:generate go tool msgp -io=false -tests=false -file=messages.go -o=messages_gen.go
//msgp:pointer
//msgp:ignore Header Tokens Floats
//msgp:vartuple Connect ConnectAck Geometry RegisterRole RankInfo RegisterRoleAck Sampling SubmitRequest TokenLogprobs Result
//msgp:vartuple Export Stats EngineReply EngineReplyPartial AbortRequest RequestAborted Source SubmitRequestWithKV
//msgp:vartuple KVTransferReady SendKV KVReadDone ReleaseKV RequestError Disconnect Pause Unpause Suspend Resume
//msgp:vartuple SetGenerationEpoch Stop StartProfiler StopProfiler Shutdown KVHandoffComplete

// Header says what a frame holds. The numbers are those of Megatron-LM's coordinator.
type Header uint8

// The headers, with who sends them.
const (
	HeaderConnect             Header = 0  // client or engine -> coordinator
	HeaderConnectAck          Header = 1  // coordinator -> client or engine
	HeaderRegisterRoleAck     Header = 2  // coordinator -> engine
	HeaderSubmitRequest       Header = 20 // client -> coordinator -> prefill (or colocated) engine
	HeaderEngineReply         Header = 21 // engine -> coordinator -> client: the request ended, or its prefill did
	HeaderEngineReplyPartial  Header = 22 // engine -> coordinator -> client: more tokens
	HeaderAbortRequest        Header = 23 // client -> coordinator -> the engine that owns the request
	HeaderSubmitRequestWithKV Header = 24 // coordinator -> decode
	HeaderReleaseKV           Header = 25 // coordinator -> prefill
	HeaderSendKV              Header = 26 // coordinator -> prefill, push transports only
	HeaderRegisterRole        Header = 27 // engine -> coordinator
	HeaderKVReadDone          Header = 28 // decode -> coordinator
	HeaderRequestError        Header = 29 // engine -> coordinator -> client
	HeaderKVTransferReady     Header = 30 // decode -> coordinator, push transports only
	HeaderRequestAborted      Header = 31 // engine -> coordinator -> client
	HeaderPause               Header = 40
	HeaderUnpause             Header = 41
	HeaderSuspend             Header = 42
	HeaderResume              Header = 43
	HeaderSetGenerationEpoch  Header = 44
	HeaderStop                Header = 45
	HeaderStartProfiler       Header = 46
	HeaderStopProfiler        Header = 47
	HeaderDisconnect          Header = 60 // engine -> coordinator: leaving; coordinator -> client or engine: not to come back
	HeaderShutdown            Header = 61 // client -> coordinator
	HeaderKVHandoffComplete   Header = 81 // rank -> leader rank
)

// Tokens are token ids; on the wire little-endian int32 in one binary string.
type Tokens []int32

// Floats are f32 values; on the wire little-endian in one binary string.
type Floats []float32

// Connect opens a connection. Name is for people (logs, metrics); Incarnation is drawn at random when a
// process starts and tells its messages from those of an earlier life.
type Connect struct {
	Version     uint32 // protocol version, major<<16 | minor
	Kind        string // "client" or "engine"
	Name        string
	Incarnation uint64
	// Of a client that renders and tokenizes for one model: the name that it serves the model by, for people, and
	// the model's fingerprint, as in Geometry.Model. A fleet of another model refuses it. Empty: any will do.
	Model, Fingerprint string
}

// ConnectAck accepts (Error empty) or refuses a connection.
type ConnectAck struct {
	Version     uint32
	Incarnation uint64 // the coordinator's
	Error       string
}

// Roles that an engine can register.
const (
	RolePrefill = "prefill"
	RoleDecode  = "decode"
	RoleBoth    = "both" // colocated: runs requests from prompt to end
)

// Geometry is what two engines must agree on before KV blocks of one mean anything to the other.
type Geometry struct {
	Model     string // fingerprint of the architecture and weights, from the checkpoint
	BlockSize int    // tokens a block
	Layers    int
	KVHeads   int // of the whole model
	HeadDim   int
	Planes    int // 2 (k and v); 1 for MLA
	KVDType   string
	VocabSize int
	MaxSeqLen int // longest sequence the engine serves; the pair serves the smaller
	// VerifyHandoff says which blocks' checksums are compared after a handoff: "off" (or empty), "sample", "all".
	VerifyHandoff string
}

// RegisterRole announces an engine: one data-parallel group of a shard.
type RegisterRole struct {
	Role        string
	Name        string // unique among live engines: "prefill_s0_dp0"
	Incarnation uint64
	Model       string // served model, for people
	Geometry    Geometry
	Transport   string // "shm", "tcp", "tcp-push"
	Ranks       []RankInfo
	Requests    int // how many requests it can hold at once
	Blocks      int // how many KV blocks it has in all
	MaxTokens   int // tokens a step
	// WeightVersion is that of the weights it serves. KV of another version is never matched.
	WeightVersion uint64
	// Continuation is how many KV blocks it sets aside for the new tokens of a request when that begins; more are
	// taken as they are needed. 0: for all tokens that the request may generate.
	Continuation int
	// Logprobs is which log-probabilities it reports, "raw" or "processed": a request's come from several engines.
	Logprobs string
}

// RankInfo is one rank's place in the layout and the transport's own description of its memory.
type RankInfo struct {
	Rank      int
	Transport []byte
	// Checksums is where in the rank's memory the checksums of its blocks begin. 0: it keeps none.
	Checksums int64
	// The rank holds, of every block, Layers from Layer on and Heads from Head on. Layers 0: all of it.
	Layer, Layers, Head, Heads int
}

// RegisterRoleAck confirms a registration (Error empty) or refuses it with the reason.
type RegisterRoleAck struct {
	Error string
}

// Sampling says how tokens are chosen and when a request ends. The zero value is greedy decoding
// without limits other than the model's.
type Sampling struct {
	Temperature       float32 // 0 is greedy
	TopK              int     // 0 is off
	TopP              float32 // 0 or 1 is off
	MinP              float32 // 0 is off
	Seed              uint64
	Choice            int // index among the n choices of one prompt; part of the random key
	PresencePenalty   float32
	FrequencyPenalty  float32
	RepetitionPenalty float32 // 0 or 1 is off
	MaxTokens         int     // 0: as many as fit
	MinTokens         int     // end and stop ids cannot be chosen before so many tokens
	IgnoreEOS         bool
	StopTokenIDs      Tokens
	Logprobs          bool // of each generated token
	TopLogprobs       int  // and of so many likeliest ones
	PromptLogprobs    bool // of each prompt token given those before it
	PromptTopLogprobs int
}

// SubmitRequest asks for a continuation of Prompt. ID is the sender's own number: the client's towards
// the coordinator, the coordinator's towards an engine. It names one stay of the request there: when the
// request comes back to the same engine, it bears another, so that what is said about the first stay cannot
// be taken for news of the second.
type SubmitRequest struct {
	ID       uint64
	Prompt   Tokens
	Sampling Sampling
	Session  string // conversation id for affinity; may be empty
	Salt     string // cache salt: prefixes are shared only among equal salts
	// Handoff asks the engine to stop after the first token and export its KV (set by the coordinator).
	Handoff bool
	// Resume holds tokens that were generated before this submission (a continuation after a failure):
	// they follow Prompt, are not sent again, and count against MaxTokens.
	Resume Tokens
	// Trace is the W3C traceparent of the request's span; empty when it is not traced.
	Trace string
}

// TokenLogprobs are the alternatives at one position: IDs[i] had log-probability Logprobs[i], best
// first. The chosen token is among them when it is one of the likeliest.
type TokenLogprobs struct {
	IDs      Tokens
	Logprobs Floats
}

// Why a request ended.
const (
	FinishStop   = "stop"   // an end-of-sequence or stop id was sampled
	FinishLength = "length" // MaxTokens or the model's length was reached
	FinishAbort  = "abort"
	// FinishEvicted ends a leg, not the request: a decode engine that lacks room gives the request back, with
	// the tokens not reported yet. It goes on with another prefill; its client sees nothing.
	FinishEvicted = "evicted"
)

// Result is news of one request: tokens that were not reported before and, once, how it ended.
type Result struct {
	ID        uint64
	Start     int // index of Tokens[0] among all generated tokens of the request
	Tokens    Tokens
	Logprobs  Floats          // of Tokens, when asked for
	Top       []TokenLogprobs // of Tokens, when asked for
	Finish    string          // empty while running
	StopToken int32           // the id that stopped it, with FinishStop; -1 otherwise

	// Reported once, with the first result.
	PromptTokens   int
	CachedTokens   int             // prompt tokens whose KV was reused, not computed
	PromptLogprobs Floats          // PromptTokens-1 values: of prompt token i+1 given those before it
	PromptTop      []TokenLogprobs // likewise

	Export *Export // with the reply that ends a prefill leg
	Stats  *Stats  // with the last result of each leg
}

// Export is what a prefill engine hands over: where the prompt's KV lies, under which name.
type Export struct {
	Handoff    uint64 // number of the export on its engine
	Capability []byte // shown by whoever reads the blocks
	Blocks     Tokens // block ids that hold the prompt, in order, the partial last one included
	Tokens     int    // prompt tokens whose KV they hold
	// Generations are those of Blocks, as uint32 bits: how often the engine had handed each out. An engine
	// verifies them before and after it lets the blocks be read.
	Generations Tokens
}

// Stats tell what a leg did and how long it took, in seconds.
type Stats struct {
	Engine         string
	Queue          float64 // from arrival at the engine to the first step
	Prefill        float64 // from the first step to the first token
	Decode         float64
	Transfer       float64 // from the start of the copy to its end
	Handoff        float64 // on decode: from the arrival of the request to its admission
	BlocksMoved    int
	BlocksReused   int // prompt blocks that decode held already
	BytesMoved     int64
	PromptComputed int // prompt tokens that were run through the model
	Evictions      int // times that the request had to give up its KV on this engine
}

// EngineReply ends requests (or their prefill leg), EngineReplyPartial only continues them.
type EngineReply struct {
	Results []Result `msg:"Results,limit=65536"`
}

// EngineReplyPartial carries new tokens of running requests.
type EngineReplyPartial struct {
	Results []Result `msg:"Results,limit=65536"`
}

// AbortRequest cancels a request.
type AbortRequest struct{ ID uint64 }

// RequestAborted confirms a cancellation: nothing of the request can be touched any more if SourceSafe.
type RequestAborted struct {
	ID         uint64
	SourceSafe bool
}

// Source tells decode where to read: the engine, the transport's description of its ranks, the blocks.
type Source struct {
	Engine      string
	Incarnation uint64
	Ranks       []RankInfo
	Export      Export
}

// SubmitRequestWithKV starts the decode leg. Generated holds the tokens that prefill sampled (and any
// before them); the client has them already.
type SubmitRequestWithKV struct {
	ID        uint64
	Prompt    Tokens
	Sampling  Sampling
	Session   string
	Salt      string
	Generated Tokens
	Source    Source
	Trace     string // as in SubmitRequest
}

// KVTransferReady says that decode's destinations wait for a push.
type KVTransferReady struct {
	ID           uint64
	CachedBlocks int    // leading blocks that decode holds already
	Blocks       Tokens // destination block ids for the rest
	Tag          []byte // the transport's own ticket: address, number, capability
}

// SendKV tells prefill to push. Fields as in KVTransferReady.
type SendKV struct {
	ID           uint64
	Handoff      uint64 // Export.Handoff
	CachedBlocks int
	Blocks       Tokens
	Tag          []byte
	Ranks        []RankInfo // decode's, from its registration
	Reader       uint64     // decode's ID of the request, for RequestError.Reader
}

// KVReadDone says that decode will not read the source again.
type KVReadDone struct{ ID uint64 }

// ReleaseKV lets prefill reuse what it held for a handoff.
type ReleaseKV struct {
	ID      uint64
	Handoff uint64
	// Corrupt says that what a reader got is not what was sealed. It may have been damaged before it was read, so
	// the blocks must not serve another request.
	Corrupt bool
}

// Codes of a RequestError.
const (
	CodeInvalid     = "invalid_request" // never going to work: bad field, too long
	CodeUnavailable = "unavailable"     // no engine of the role; try again
	CodeEngineLost  = "engine_lost"     // the engine that ran it died; try again
	CodeInternal    = "internal"
	CodeCorrupt     = "corrupt_kv" // what arrived is not what was exported: prefill again
	CodeGone        = "kv_gone"    // the export has ended, or is unknown: prefill again
)

// RequestError ends a request with a failure.
type RequestError struct {
	ID         uint64
	Code       string
	Field      string // the request's field at fault, when one is
	Message    string
	Retryable  bool
	SourceSafe bool
	// Reader is that of the SendKV whose push failed; 0 when the error is about something else.
	Reader uint64
}

// Disconnect announces that an engine leaves; from the coordinator, that it ends the connection, and would refuse
// another for as long as the Reason lasts. The Reason is for people.
type Disconnect struct{ Reason string }

// Pause asks an engine to finish its step and start no other until Unpause.
type Pause struct{}

// Unpause ends a Pause.
type Unpause struct{}

// Suspend asks an engine to give its device memory back until Resume.
type Suspend struct{}

// Resume ends a Suspend.
type Resume struct{}

// SetGenerationEpoch numbers what is generated from now on.
type SetGenerationEpoch struct{ Epoch uint64 }

// Stop asks an engine to end its requests and leave.
type Stop struct{}

// StartProfiler asks for a CPU profile, written to Path on the engine's machine.
type StartProfiler struct{ Path string }

// StopProfiler ends the profile.
type StopProfiler struct{}

// Shutdown asks the coordinator to stop everything.
type Shutdown struct{}

// KVHandoffComplete is the end of one rank's part of a handoff. The leader counts them: the handoff is complete
// when all ranks have theirs, and fails with the first that does.
type KVHandoffComplete struct {
	ID         uint64 // of the transfer, a number of the engine's
	Rank       int    // within the engine
	Failed     bool
	SourceSafe bool // nothing touches the memory of either side any more
	Engine     int  // within the shard
	Bytes      int64
	Error      string
}
