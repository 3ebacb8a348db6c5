package relay

import (
	"fmt"
	"sync"
	"time"
)

// Widths of a request id's parts, from the top: milliseconds, node, process, counter.
const (
	nodeBits    = 8
	processBits = 6
	counterBits = 10
	timeBits    = 39

	timeShift = nodeBits + processBits + counterBits
)

// Nodes is how many relays may mint ids for the same engines.
const Nodes = 1 << nodeBits

// firstID is where request ids begin: engines number requests of their own below.
const firstID = 1 << 40

// Snowflake is the request id of a moment: 39 bits of milliseconds, 8 of node, 6 of process and 10 of counter, turned
// so that it is at least 2^40. Node, process and counter can be read from the low 24 bits. What exceeds its width is
// cut off; the last 65.5 s of the 39-bit range of milliseconds (17.4 years) repeat the first.
func Snowflake(ms uint64, node, process, counter uint64) int64 {
	raw := ms&(1<<timeBits-1)<<timeShift |
		node&(1<<nodeBits-1)<<(processBits+counterBits) |
		process&(1<<processBits-1)<<counterBits |
		counter&(1<<counterBits-1)
	return int64(raw%(1<<63-1-firstID)) + firstID
}

// Minter makes request ids that no other Minter of another node makes, and never one twice: not when more than 1024
// are made in a millisecond, and not after a restart unless the clock was set back meanwhile. It is safe for
// concurrent use.
type Minter struct {
	node uint64
	now  func() time.Time

	mu      sync.Mutex
	ms      uint64 // of the last id; ahead of the clock after a burst
	counter uint64
}

// NewMinter makes the minter of a node, which is below Nodes. Two at the same engines need different nodes.
func NewMinter(node int) (*Minter, error) {
	if node < 0 || node >= Nodes {
		return nil, fmt.Errorf("node id %d: it takes 8 bits, 0 to %d, and must differ among relays of the same engines", node, Nodes-1)
	}
	start := time.Now() // its monotonic part keeps ids in order when the clock is set
	return &Minter{node: uint64(node), now: func() time.Time { return start.Add(time.Since(start)) }}, nil
}

// Mint makes an id.
func (m *Minter) Mint() int64 {
	now := uint64(m.now().UnixMilli())
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case now > m.ms:
		m.ms, m.counter = now, 0
	case m.counter < 1<<counterBits-1:
		m.counter++
	default:
		m.ms, m.counter = m.ms+1, 0
	}
	return Snowflake(m.ms, m.node, 0, m.counter)
}
