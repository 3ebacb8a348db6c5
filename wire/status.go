package wire

//go:generate go tool msgp -io=false -tests=false -file=status.go -o=status_gen.go
//msgp:pointer
//msgp:ignore Header
//msgp:vartuple StatusRequest StatusReply EngineStatus QueueStatus

// The headers of the coordinator's report about itself, which the reference system does not have.
const (
	HeaderStatusRequest Header = 90 // client -> coordinator
	HeaderStatusReply   Header = 91 // coordinator -> client
)

// StatusRequest asks a coordinator how its fleet is. ID is the sender's own; the reply repeats it.
type StatusRequest struct{ ID uint64 }

// StatusReply is a coordinator's view of its fleet at one moment.
type StatusReply struct {
	ID     uint64
	Ready  bool   // a request that is submitted now finds an engine of every role it needs
	Reason string // why not
	Phase  string // "running", "paused", "suspended" or "stopping"

	// What the engines have in common; zero while there is none.
	Model         string
	Geometry      Geometry // MaxSeqLen is the shortest of all engines
	Colocated     bool
	Transport     string
	WeightVersion uint64

	Policy   string
	Requests int // that have not ended
	Queues   []QueueStatus
	Engines  []EngineStatus
}

// QueueStatus tells how many requests wait for an engine of a role.
type QueueStatus struct {
	Role   string
	Length int
}

// EngineStatus is one engine as the coordinator sees it. What is reserved may be more than the engine
// uses.
type EngineStatus struct {
	Name           string
	Role           string
	Model          string
	Draining       bool
	Requests       int // that it can hold
	RequestsInUse  int
	Blocks         int // KV blocks that it has
	BlocksReserved int
}

// Header is HeaderStatusRequest.
func (*StatusRequest) Header() Header { return HeaderStatusRequest }

// Header is HeaderStatusReply.
func (*StatusReply) Header() Header { return HeaderStatusReply }
