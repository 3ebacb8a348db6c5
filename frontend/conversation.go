package frontend

import (
	"bytes"
	"container/list"
	"encoding/json/jsontext"
	"hash/maphash"
	"math/bits"
	"slices"
	"sync"

	"baton/text"
)

// ConversationLimits bound what a server remembers of conversations. What was used least recently goes first.
type ConversationLimits struct {
	Entries int   // turns; default 4096, negative remembers nothing
	Bytes   int64 // default 256 MiB
}

func (l *ConversationLimits) setDefaults() {
	if l.Entries == 0 {
		l.Entries = 4096
	}
	if l.Bytes == 0 {
		l.Bytes = 256 << 20
	}
}

// conversations remembers the latest turns: what was rendered and encoded, and what was answered. It is found by what the
// messages begin with, byte by byte, so nothing is taken for another's; conversation ids only tell apart what begins alike.
type conversations struct {
	mu      sync.Mutex
	limits  ConversationLimits
	turns   map[chainKey][]*turn
	scopes  map[scope]*turn // the latest turn of a conversation with an id
	recent  *list.List      // of *turn, the one used last first
	bytes   int64
	metrics *promptMetrics
}

// scope is whose a conversation is. Turns of different scopes share no sampled ids.
type scope struct{ conversation, salt string }

// turn is one request of a conversation.
type turn struct {
	scope   scope
	key     chainKey
	written *writing
	script  *text.Script
	// prefix is the number of the script's first ids that were sampled, or came with the messages (carried), and message the
	// last message that they are; 0 for none.
	prefix  int
	message int
	carried bool
	list    idList // the prompt that came with the last of the messages that are new in this turn

	// Under the lock of conversations:
	at      *list.Element // nil once it is forgotten
	size    int64
	answers []*said // the latest last
}

// said is what was answered.
type said struct {
	content, reasoning string
	calls              []text.ToolCall
	// ids are the answer's without the end of sequence, with the beginning of a call that was not sampled. They follow so many
	// ids of the turn's script.
	ids   []int32
	begin int
}

// writing is an array of messages as a client wrote it, without the bracket that closes it: what a turn added to an
// earlier one. Turns share what they have in common.
type writing struct {
	before *writing // nil for none
	added  []byte
	end    int // bytes, those before included

	// Under the lock of conversations: turns of this and writings that follow it, as far as they are in use.
	uses int
}

// and is an array that goes on from an earlier one, nil for none.
func (w *writing) and(more []byte) *writing {
	end := len(more)
	if w != nil {
		end += w.end
	}
	if w != nil && end == w.end {
		return w
	}
	return &writing{before: w, added: bytes.Clone(more), end: end}
}

func (w *writing) size() int64 { return int64(len(w.added)) + 64 }

// begins reports whether an array of messages begins with these.
func (w *writing) begins(messages []byte) bool {
	if w.end < 2 || len(messages) <= w.end || !goesOn(messages[w.end:]) {
		return false
	}
	// Many that begin alike differ at the end, if at all.
	for ; w != nil; w = w.before {
		if !bytes.Equal(messages[w.end-len(w.added):w.end], w.added) {
			return false
		}
	}
	return true
}

// chainKey names the bytes that messages begin with, up to the end of a block.
type chainKey struct {
	end  int
	hash uint64
}

// Blocks of messages. Those behind the first ones are larger, and only their ends are looked at: ids differ everywhere if
// at all, and turns that have a key in common are compared.
const (
	chainBlock  = 256
	chainFirst  = 64 << 10
	chainBehind = 1024
	chainEnd    = 128
)

var chainSeed = maphash.MakeSeed()

// chain gives the keys of what messages begin with, the key of nothing first. The end of messages may be that of another's, which
// go on.
func chain(messages []byte) []chainKey {
	keys := make([]chainKey, 1, 1+min(len(messages), chainFirst)/chainBlock+len(messages)/chainBehind)
	for last := keys[0]; ; keys = append(keys, last) {
		from, end := last.end, last.end+chainBlock
		if last.end >= chainFirst {
			end = last.end + chainBehind
			from = end - chainEnd
		}
		if end > len(messages) {
			return keys
		}
		high, low := bits.Mul64(last.hash^maphash.Bytes(chainSeed, messages[from:end]), 0x9e3779b97f4a7c15)
		last = chainKey{end, high ^ low}
	}
}

// lastKey is the key of the first n bytes.
func lastKey(keys []chainKey, n int) chainKey {
	i, _ := slices.BinarySearchFunc(keys, n+1, func(k chainKey, n int) int { return k.end - n })
	return keys[i-1]
}

func newConversations(limits ConversationLimits, m *promptMetrics) *conversations {
	if limits.Entries < 0 {
		return nil
	}
	return &conversations{limits: limits, turns: map[chainKey][]*turn{}, scopes: map[scope]*turn{}, recent: list.New(), metrics: m}
}

// maxAlike bounds the turns that begin alike: choices of one prompt, and whoever asks the same.
const maxAlike = 64

// find gives the turns that messages, which may go on with anything and have these keys, begin with: all of them that
// hold the most of it.
func (c *conversations) find(messages []byte, keys []chainKey) (found []*turn) {
	for len(found) == 0 && len(keys) > 0 {
		var list []*turn
		list, keys = c.alike(keys)
		slices.SortStableFunc(list, func(a, b *turn) int { return b.written.end - a.written.end })
		for _, t := range list {
			if len(found) > 0 && t.written.end < found[0].written.end {
				break
			}
			if len(found) > 0 && t.written == found[0].written || t.written.begins(messages) {
				found = append(found, t)
			}
		}
	}
	return found
}

// alike are the turns of the last key that has any, and the keys before it: their turns have shorter messages.
func (c *conversations) alike(keys []chainKey) ([]*turn, []chainKey) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for n := len(keys) - 1; n >= 0; n-- {
		if list := c.turns[keys[n]]; len(list) > 0 {
			return slices.Clone(list), keys[:n]
		}
	}
	return nil, nil
}

// goesOn reports whether an array ends here, or has a comma and something behind it.
func goesOn(rest []byte) bool {
	rest = bytes.TrimLeft(rest, " \t\r\n")
	if len(rest) == 0 || rest[0] != ',' {
		return len(rest) > 0 && rest[0] == ']'
	}
	rest = bytes.TrimLeft(rest[1:], " \t\r\n")
	return len(rest) > 0 && rest[0] != ']'
}

// latest is the last turn of a scope, if it has an id.
func (c *conversations) latest(s scope) *turn {
	if c == nil || s.conversation == "" {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.scopes[s]
}

// put remembers a turn that follows another, which may be nil and is less likely to be asked for from then on.
func (c *conversations) put(t, prev *turn) {
	t.size = int64(t.script.Size())
	c.mu.Lock()
	defer c.mu.Unlock()
	if t.size+int64(t.written.end) > c.limits.Bytes {
		return
	}
	t.at = c.recent.PushFront(t)
	c.bytes += t.size
	c.hold(t.written)
	c.turns[t.key] = append([]*turn{t}, c.turns[t.key]...)
	if t.scope.conversation != "" {
		c.scopes[t.scope] = t
	}
	if prev != nil && prev.at != nil {
		c.recent.MoveToBack(prev.at)
	}
	if alike := c.turns[t.key]; len(alike) > maxAlike {
		c.forget(alike[len(alike)-1])
	}
	c.trim()
}

// hold counts a use of what was written, and drop one less.
func (c *conversations) hold(w *writing) {
	for ; w != nil; w = w.before {
		if w.uses++; w.uses > 1 {
			return
		}
		c.bytes += w.size()
	}
}

func (c *conversations) drop(w *writing) {
	for ; w != nil; w = w.before {
		if w.uses--; w.uses > 0 {
			return
		}
		c.bytes -= w.size()
	}
}

// use says that a turn is of use.
func (c *conversations) use(t *turn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if t.at != nil {
		c.recent.MoveToFront(t.at)
	}
}

// answered remembers what was answered to a turn, which may have been asked for several times.
func (c *conversations) answered(t *turn, a *said) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if t.at == nil {
		return
	}
	more := a.size()
	if len(t.answers) >= maxAlike {
		more -= t.answers[0].size()
		t.answers = t.answers[1:]
	}
	t.answers = append(slices.Clip(t.answers), a)
	t.size += more
	c.bytes += more
	c.trim()
}

func (a *said) size() int64 {
	n := len(a.content) + len(a.reasoning) + 4*len(a.ids) + 128
	for i := range a.calls {
		n += len(a.calls[i].Arguments) + 128
	}
	return int64(n)
}

// answer is what was answered to a turn, if that is the message that came back; nil if not.
func (c *conversations) answer(t *turn, back jsontext.Value) *said {
	c.mu.Lock()
	answers := t.answers
	c.mu.Unlock()
	if back == nil {
		return nil
	}
	for _, a := range slices.Backward(answers) {
		if len(a.ids) > 0 && a.is(back) {
			return a
		}
	}
	return nil
}

func (c *conversations) trim() {
	for c.recent.Len() > 0 && (c.recent.Len() > c.limits.Entries || c.bytes > c.limits.Bytes) {
		c.forget(c.recent.Back().Value.(*turn))
	}
	c.metrics.turns.Set(float64(c.recent.Len()))
	c.metrics.turnBytes.Set(float64(c.bytes))
}

func (c *conversations) forget(t *turn) {
	c.recent.Remove(t.at)
	t.at = nil
	c.bytes -= t.size
	c.drop(t.written)
	left := slices.DeleteFunc(c.turns[t.key], func(x *turn) bool { return x == t })
	if c.turns[t.key] = left; len(left) == 0 {
		delete(c.turns, t.key)
	}
	if c.scopes[t.scope] == t {
		delete(c.scopes, t.scope)
	}
}

// known is the beginning of a body's messages that an earlier request had, and that was checked then.
type known struct {
	turns   []*turn    // all of the same messages; empty for none
	at      int        // where the array begins in the body
	removed int        // bytes that are left out in body: known messages
	cut     cut        // ids that are left out behind them, as the turns have them
	body    []byte     // without what is known, then with memory of its own
	keys    []chainKey // of the array, which other bytes may follow; nil if they are not known
}

// recall looks for what is known of a body. The rest is then read as if it were all: what is left out are whole elements of
// the array of messages, if it is that array, which settle tells.
func (c *conversations) recall(body []byte) known {
	k := known{body: body, at: -1}
	if c == nil {
		return k
	}
	if k.at = arrayAt(body, `"messages"`); k.at < 0 {
		return k
	}
	k.keys = chain(body[k.at:])
	if k.turns = c.find(body[k.at:], k.keys); len(k.turns) == 0 {
		return k
	}
	rest := bytes.TrimLeft(body[k.at+k.turns[0].written.end:], " \t\r\n")
	if rest[0] == ',' {
		rest = rest[1:]
	}
	k.removed = len(body) - len(rest) - (k.at + 1)
	k.cut = k.turns[0].list.cutIn(rest)
	k.body = slices.Concat(body[:k.at+1], rest[:k.cut.at+1], rest[k.cut.at+1+k.cut.size:])
	k.cut.at += k.at + 1
	return k
}

// arrayAt is where the array that is a member of such a name, with its quotes, seems to begin, -1 if it is not seen.
func arrayAt(body []byte, name string) int {
	at := 0
	for range 8 { // tools may have a parameter of that name
		i := bytes.Index(body[at:], []byte(name))
		if i < 0 {
			return -1
		}
		at += i + len(name)
		rest := bytes.TrimLeft(body[at:], " \t\r\n")
		if len(rest) > 0 && rest[0] == ':' {
			if rest = bytes.TrimLeft(rest[1:], " \t\r\n"); len(rest) > 0 && rest[0] == '[' {
				return len(body) - len(rest)
			}
		}
	}
	return -1
}

// settle puts what is known of a body before what was read of the rest. It reports false if what was left out were not its
// messages.
func (k *known) settle(body []byte, c *Chat) bool {
	read := c.raw
	if k.at < 0 || k.at >= len(k.body) || &read[0] != &k.body[k.at] {
		return false
	}
	if len(k.turns) == 0 {
		return true
	}
	if k.cut.size > 0 {
		if !c.cutSeen {
			return false
		}
		switch at := c.list.at + k.at; {
		case at == k.cut.at:
			c.list.size += k.cut.size
		case at > k.cut.at:
			c.list.at += k.cut.size
		}
	}
	before := k.turns[0].written
	c.written = before.and(trimArray(body[k.at+before.end : k.at+len(read)+k.removed+k.cut.size]))
	c.list.at += k.removed
	old := k.turns[0].script.Messages() // the same of all, as it follows from what is written
	if len(c.Messages) > 2 {
		old = slices.Concat(old, []byte{','})
	}
	c.Messages = slices.Concat(old, c.Messages[1:])
	return true
}

// trimArray leaves out what follows the last element.
func trimArray(open []byte) []byte { return bytes.TrimRight(open, " \t\r\n") }
