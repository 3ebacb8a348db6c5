package frontend

import (
	"bytes"
	"container/list"
	"encoding/json/jsontext"
	"hash/maphash"
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
	scope  scope
	key    chainKey
	script *text.Script
	// prefix is the number of the script's first ids that were sampled, or came with the messages (carried), and message the
	// last message that they are; 0 for none.
	prefix  int
	message int
	carried bool

	// Under the lock of conversations:
	at      *list.Element // nil once it is forgotten
	size    int64
	answers []*said // the latest last
}

// said is what was answered.
type said struct {
	content, reasoning string
	calls              []text.ToolCall
	ids                []int32 // without the end of sequence
}

// chainKey names the bytes that messages begin with: so many blocks of them.
type chainKey struct {
	blocks int
	hash   uint64
}

const chainBlock = 256

var chainSeed = maphash.MakeSeed()

// chain gives the key of each number of blocks of messages, the key of none first.
func chain(messages []byte) []chainKey {
	keys := make([]chainKey, 1, len(messages)/chainBlock+1)
	var h maphash.Hash
	h.SetSeed(chainSeed)
	for n := 1; n*chainBlock <= len(messages); n++ {
		h.Write(messages[(n-1)*chainBlock : n*chainBlock])
		keys = append(keys, chainKey{n, h.Sum64()})
	}
	return keys
}

func newConversations(limits ConversationLimits, m *promptMetrics) *conversations {
	if limits.Entries < 0 {
		return nil
	}
	return &conversations{limits: limits, turns: map[chainKey][]*turn{}, scopes: map[scope]*turn{}, recent: list.New(), metrics: m}
}

// maxAlike bounds the turns that begin alike: choices of one prompt, and whoever asks the same.
const maxAlike = 64

// find gives the turns that messages, which may go on with anything, begin with: all of them that hold the most of it.
func (c *conversations) find(messages []byte) []*turn {
	if c == nil {
		return nil
	}
	keys := chain(messages)
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, key := range slices.Backward(keys) {
		var found []*turn
		for _, t := range c.turns[key] {
			if !begins(messages, t.script) {
				continue
			}
			if len(found) > 0 && t.script.Len() != found[0].script.Len() {
				if t.script.Len() < found[0].script.Len() {
					continue
				}
				found = found[:0]
			}
			found = append(found, t)
		}
		if len(found) > 0 {
			return found
		}
	}
	return nil
}

// begins reports whether an array of messages begins with those of a script.
func begins(messages []byte, s *text.Script) bool {
	own := s.Messages()
	if len(own) < 2 || len(messages) <= len(own) {
		return false
	}
	// Many that begin alike differ at the end, if at all.
	last := max(0, len(own)-chainBlock)
	if !bytes.Equal(messages[last:len(own)], own[last:]) || !bytes.Equal(messages[:last], own[:last]) {
		return false
	}
	return goesOn(messages[len(own):])
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
	keys := chain(t.script.Messages())
	t.key = keys[len(keys)-1]
	t.size = int64(t.script.Size())
	c.mu.Lock()
	defer c.mu.Unlock()
	if t.size > c.limits.Bytes {
		return
	}
	t.at = c.recent.PushFront(t)
	c.bytes += t.size
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
	turns   []*turn // all of the same messages; empty for none
	at      int     // where the array begins in the body
	removed int     // bytes that are left out in body
	body    []byte  // without what is known
}

// recall looks for what is known of a body. The rest is then read as if it were all: what is left out are whole elements of
// the array of messages, if it is that array, which confirm tells.
func (c *conversations) recall(body []byte) known {
	k := known{body: body, at: -1}
	if c == nil {
		return k
	}
	if k.at = messagesAt(body); k.at < 0 {
		return k
	}
	if k.turns = c.find(body[k.at:]); len(k.turns) == 0 {
		return k
	}
	end := k.at + len(k.turns[0].script.Messages())
	rest := bytes.TrimLeft(body[end:], " \t\r\n")
	if rest[0] == ',' {
		rest = rest[1:]
	}
	k.removed = len(body) - len(rest) - (k.at + 1)
	k.body = slices.Concat(body[:k.at+1], rest)
	return k
}

// messagesAt is where the value of "messages" seems to begin, -1 if it is not seen.
func messagesAt(body []byte) int {
	const name = `"messages"`
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

// confirm gives the whole array of messages, when raw is what was read of the body without what is known.
func (k *known) confirm(whole, raw []byte) ([]byte, bool) {
	if len(raw) == 0 || k.at >= len(k.body) || &raw[0] != &k.body[k.at] {
		return nil, false
	}
	return whole[k.at : k.at+len(raw)+k.removed], true
}

// messages is how many are known.
func (k *known) messages() int {
	if len(k.turns) == 0 {
		return 0
	}
	return k.turns[0].script.Len()
}
