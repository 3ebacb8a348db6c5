package wire

import (
	"fmt"
	"time"

	"github.com/tinylib/msgp/msgp"
)

//go:generate go tool msgp -io=false -tests=false -file=link.go -o=link_gen.go
//msgp:pointer
//msgp:ignore Header
//msgp:vartuple ClaimKV ClaimAck RenewKV KVState

// The headers of the links between engines that serve single legs of requests, without a coordinator. SendKV,
// KVReadDone, AbortRequest and RequestError go over links as well.
const (
	HeaderClaimKV  Header = 94 // decode -> prefill
	HeaderClaimAck Header = 95 // prefill -> decode
	HeaderRenewKV  Header = 96 // decode -> prefill -> its engine
	HeaderKVState  Header = 97 // prefill -> decode, through whoever carries the request
)

// ClaimKV asks for the right to read an export, before a byte of it is read. ID is the sender's number of the
// request, by which all else on the link names the claim.
type ClaimKV struct {
	ID          uint64
	Incarnation uint64 // of the process that made the export
	Request     uint64 // that process's number of the request
	Capability  []byte
	State       [32]byte // SHA-256 of the encoded KVState: nobody has changed it on the way
}

// ClaimAck grants a claim. The export stays for Lease from now, and from each RenewKV.
type ClaimAck struct {
	ID    uint64
	Lease time.Duration
}

// RenewKV begins an export's lease anew. On a link, ID is the claim's; towards an engine it is the request's, and
// Handoff the export's number there.
type RenewKV struct {
	ID      uint64
	Handoff uint64
}

// KVStateFormat is this build's form of a KVState. Another one is refused.
const KVStateFormat = 1

// KVState is what a request's first leg leaves for the second where no coordinator is between them: opaque to whoever
// carries it. It holds a capability, so it is as secret as the prompt. The decode engine believes it once the
// engine that made it has recognized it (ClaimKV).
type KVState struct {
	Format      uint32
	Address     string // of the link of the engine that holds the KV
	Engine      string
	Incarnation uint64
	Request     uint64 // its number of the request

	// What the decode engine must share to make sense of the blocks.
	Geometry      Geometry
	Transport     string
	WeightVersion uint64
	Logprobs      string
	Ranks         []RankInfo `msg:"Ranks,limit=4096"`

	Export Export
	Prompt [32]byte // SHA-256 of the cache salt and the prompt's ids

	// What the first leg has to report that the second cannot know.
	CachedTokens   int
	PromptLogprobs Floats
	PromptTop      []TokenLogprobs `msg:"PromptTop,limit=1048576"`
	Stats          *Stats
}

// Header is HeaderClaimKV.
func (*ClaimKV) Header() Header { return HeaderClaimKV }

// Header is HeaderClaimAck.
func (*ClaimAck) Header() Header { return HeaderClaimAck }

// Header is HeaderRenewKV.
func (*RenewKV) Header() Header { return HeaderRenewKV }

// Header is HeaderKVState.
func (*KVState) Header() Header { return HeaderKVState }

// Encode is a message as bytes, for those that do not travel over a Conn.
func Encode(m Message) ([]byte, error) {
	b := msgp.AppendArrayHeader(make([]byte, 0, frameBound(m)), 2)
	b = msgp.AppendUint8(b, uint8(m.Header()))
	b, err := m.MarshalMsg(b)
	if err != nil {
		return nil, fmt.Errorf("wire: encode %v: %w", m.Header(), err)
	}
	return b, nil
}

// Decode reads what Encode made. Its error is a *MalformedError. The message shares no memory with b.
func Decode(b []byte) (Message, error) { return decodeFrame(b) }
