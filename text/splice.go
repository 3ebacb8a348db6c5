package text

import (
	"bytes"
	"context"
	"slices"
	"strings"
	"time"
)

// Script is a conversation as a template shows it, with its ids: what the next turn is made from. It is immutable
// and safe for concurrent use.
type Script struct {
	template *Template
	chat     Chat           // with copies of what the caller gave; Now is the time of the first turn
	ends     []int          // where each message ends in chat.Messages
	shapes   []messageShape // of each message
	prompt   Prompt
	body     int    // bytes of the prompt's text before the generation prompt; -1 if nothing can be built on it
	why      Reason // and why not
	ids      []int32
	syncs    []syncPoint

	// The messages that stand for all of them when the next turn is rendered, and what the template makes of these
	// alone, without a generation prompt.
	window     []int
	picked     int // of them when they were picked; the others have come since
	windowText string
	opens      []opening
}

// opening is the generation prompt after a message of some shape.
type opening struct {
	after messageShape
	text  string
}

// Prefix is what the model was given and sampled itself, which a conversation's ids must begin with.
type Prefix struct {
	// IDs are a prompt and what was sampled after it; empty for none.
	IDs []int32
	// Message is the index of the assistant's message that the sampled ids are.
	Message int
}

// Reuse says what a Script was made from.
type Reuse struct {
	Reason Reason
	Text   int // bytes of text that were not rendered again
	IDs    int // ids that were not encoded again
	// Spliced is set when the ids begin with a Prefix that is not what the template's text would be encoded to.
	Spliced bool
}

// Reason is why a conversation was rendered as a whole, or that it was not.
type Reason string

// The reasons.
const (
	Extended     Reason = "extended"      // only what is new was rendered
	Fresh        Reason = "new"           // there was no earlier Script
	Edited       Reason = "edited"        // the messages do not begin with the earlier ones
	OtherTools   Reason = "tools"         // the tools or documents are others
	OtherOptions Reason = "options"       // the template's arguments are others
	Unstable     Reason = "template"      // what the template shows of a message depends on messages far from it
	LongTurn     Reason = "long_turn"     // too many different messages since the last one of the user
	Seam         Reason = "seam"          // the new text does not fit the end of the old
	Continued    Reason = "final_message" // the last message is to be continued
)

// Reasons are all of them.
func Reasons() []Reason {
	return []Reason{Extended, Fresh, Edited, OtherTools, OtherOptions, Unstable, LongTurn, Seam, Continued}
}

// IDs are the conversation's ids, which must not be changed.
func (s *Script) IDs() []int32 { return s.ids }

// Text is what the template shows.
func (s *Script) Text() string { return s.prompt.Text }

// Messages is the conversation's array of messages as JSON, without the bracket that closes it.
func (s *Script) Messages() []byte { return s.chat.Messages[:s.end()] }

// Len is the number of messages.
func (s *Script) Len() int { return len(s.ends) }

// Size is about the bytes of memory that the Script takes.
func (s *Script) Size() int {
	return len(s.chat.Messages) + len(s.chat.Tools) + len(s.chat.Documents) + len(s.chat.Extra) + len(s.prompt.Text) +
		len(s.windowText) + 4*len(s.ids) + 16*len(s.syncs) + 24*len(s.ends) + 8*len(s.prompt.plain) + 512
}

// end is where the last message ends.
func (s *Script) end() int {
	if len(s.ends) == 0 {
		return min(1, len(s.chat.Messages))
	}
	return s.ends[len(s.ends)-1]
}

// Follows says whether a chat can be rendered from s: Extended, or why not. Nothing follows a nil Script.
func (s *Script) Follows(tm *Template, c *Chat) Reason {
	switch {
	case s == nil:
		return Fresh
	case c.ContinueFinalMessage:
		return Continued
	case s.template != tm || s.chat.AddGenerationPrompt != c.AddGenerationPrompt || !bytes.Equal(s.chat.Extra, c.Extra):
		return OtherOptions
	case !bytes.Equal(s.chat.Tools, c.Tools) || !bytes.Equal(s.chat.Documents, c.Documents):
		return OtherTools
	case !s.begins(c.Messages):
		return Edited
	case s.body < 0:
		return s.why
	}
	return Extended
}

// begins reports whether an array of messages begins with those of s, byte by byte.
func (s *Script) begins(messages []byte) bool {
	own := s.chat.Messages[:s.end()]
	if len(own) == 0 || !bytes.HasPrefix(messages, own) {
		return false
	}
	rest := bytes.TrimLeft(messages[len(own):], whiteSpace)
	if len(rest) == 0 || rest[0] != ',' {
		return len(rest) > 0 && rest[0] == ']'
	}
	rest = bytes.TrimLeft(rest[1:], whiteSpace)
	return len(s.ends) > 0 && len(rest) > 0 && rest[0] != ']' // an array does not end with a comma
}

// Transcribe renders a chat and encodes it. When the chat follows prev, which may be nil, only what is new costs
// anything but the copying of bytes; otherwise Reuse tells why all of it was rendered. The ids are those of Render and
// EncodePrompt but for p: a conversation with a Prefix has the ids of p in place of what the template's text up to the
// end of that message would be encoded to. A Prefix that cannot be fitted is a PrefixError; the other errors are Render's.
//
// What is new is rendered behind a few old messages, those that the template may tell apart, and what it shows of the new
// ones is put behind the old text. Whether a template lets itself be treated so is tried out once; at each turn the text
// must fit at the seam. A date that the template writes is that of the conversation's first turn.
func (t *Tokenizer) Transcribe(ctx context.Context, tm *Template, prev *Script, c Chat, p Prefix) (*Script, Reuse, error) {
	r := &rendering{t: t, tm: tm, chat: c}
	if c.ContinueFinalMessage {
		reuse := Reuse{Reason: Continued}
		s, err := r.final(ctx, p, &reuse)
		return s, reuse, err
	}
	return r.run(ctx, prev, p, Reuse{Reason: prev.Follows(tm, &c)})
}

// final renders a chat whose last message is to be continued. Nothing can follow it.
func (r *rendering) final(ctx context.Context, p Prefix, reuse *Reuse) (*Script, error) {
	prompt, err := r.tm.Render(ctx, r.chat)
	if err != nil {
		return nil, err
	}
	s := &Script{template: r.tm, prompt: prompt, body: -1, why: Continued}
	if len(p.IDs) == 0 {
		s.ids, s.syncs, err = r.t.encodeFrom(prompt, nil, nil)
		return s, err
	}
	if _, err := r.scan(nil, 0); err != nil {
		return nil, err
	}
	switch last := len(r.ends) - 1; {
	case p.Message < 0 || p.Message > last:
		return nil, &PrefixError{Message: p.Message, EOS: r.t.special.EOS, Reason: "there is no such message"}
	case p.Message == last: // the sampled ids are what is to be continued
		s.ids = p.IDs
		if n := len(s.ids) - 1; s.ids[n] == r.t.special.EOS {
			s.ids = s.ids[:n]
		}
		canonical, _, err := r.t.encodeFrom(prompt, nil, nil)
		reuse.IDs, reuse.Spliced = len(s.ids), !slices.Equal(s.ids, canonical)
		return s, err
	}
	until := r.chat
	until.Messages = slices.Concat(until.Messages[:r.ends[p.Message]], []byte{']'})
	until.ContinueFinalMessage = false
	shown, err := r.tm.Render(ctx, until)
	if err != nil {
		return nil, err
	}
	return s, r.encode(s, encoded{}, shown, p, reuse)
}

// run renders a chat, from prev if reuse says so.
func (r *rendering) run(ctx context.Context, prev *Script, p Prefix, reuse Reuse) (*Script, Reuse, error) {
	if r.chat.Now.IsZero() {
		r.chat.Now = time.Now()
	}
	if reuse.Reason == Extended {
		now := r.chat.Now
		r.chat.Now = prev.chat.Now
		s, why, err := r.extend(ctx, prev, p, &reuse)
		if err != nil || why == Extended {
			return s, reuse, err
		}
		reuse = Reuse{Reason: why}
		r.chat.Now = now
	}
	s, err := r.whole(ctx, prev, p, &reuse)
	return s, reuse, err
}

// encode makes the ids of a script: those of its text with the prefix in its place. base are ids that its text begins
// with, up to the last of their sync points. shown is the text up to the end of the prefix's message; it is not needed
// when base begins with the prefix.
func (r *rendering) encode(s *Script, base encoded, shown Prompt, p Prefix, reuse *Reuse) error {
	if r.trial {
		return nil
	}
	var err error
	if len(p.IDs) == 0 || hasPrefix(base.ids, p.IDs) {
		reuse.IDs = len(base.ids)
		s.ids, s.syncs, err = r.t.encodeFrom(s.prompt, base.ids, base.syncs)
		return err
	}
	base = base.upTo(commonPrefix(shown.Text, s.prompt.Text) - r.t.lookahead())
	template, templateSyncs, err := r.t.encodeTail(shown, base)
	if err != nil {
		return err
	}
	if !r.endsAtEOS(shown, templateSyncs, base.ids, template) {
		return &PrefixError{Message: p.Message, EOS: r.t.special.EOS, Reason: "the template does not end that message with it"}
	}
	all, syncs, err := r.t.encodeTail(s.prompt, base)
	if err != nil {
		return err
	}
	var k int
	if s.ids, k, err = replacePrefix(p.IDs, base.ids, template, all, r.t.special.EOS); err != nil {
		err.(*PrefixError).Message = p.Message
		return err
	}
	end := len(s.ids) - (len(base.ids) + len(all) - k) // ids of the prefix
	reuse.IDs = end
	same := commonIDs(s.ids[:end], base.ids[:min(k, len(base.ids))]) // ids that the text has too
	if same == len(base.ids) {
		same += commonIDs(s.ids[same:end], all[:k-same])
	}
	reuse.Spliced = same < end || same < k
	for _, at := range syncs {
		switch {
		case at.ids > k:
			s.syncs = append(s.syncs, syncPoint{at.text, at.ids + end - k})
		case at.ids <= same:
			s.syncs = append(s.syncs, at)
		}
	}
	return nil
}

// endsAtEOS reports whether nothing but white space follows the last end-of-sequence token of a text, whose ids are those of base
// and tail.
func (r *rendering) endsAtEOS(p Prompt, syncs []syncPoint, base, tail []int32) bool {
	eos := r.t.special.EOS
	for _, at := range slices.Backward(syncs) {
		if at.ids == 0 {
			continue
		}
		last, ids := at.ids-1, base
		if last >= len(base) {
			last, ids = last-len(base), tail
		}
		if ids[last] == eos {
			return len(strings.TrimSpace(p.Text[at.text:])) == 0
		}
	}
	return false
}

// replacePrefix puts the ids that a model saw and sampled in place of the ids that a template's text up to the end of the
// same message has. prior are the model's; base and upTo are the template's up to the end of the message that prior ends with,
// base and all those of the whole conversation. The message ends at as many end-of-sequence tokens as upTo has: counting them
// survives templates that show an old message otherwise once others follow it. k is where, in base and all, the ids begin that follow prior;
// the template's end-of-sequence token is the first of them, so that it closes a message that was cut off as well.
func replacePrefix(prior, base, upTo, all []int32, eos int32) (ids []int32, k int, err error) {
	if len(prior) == 0 {
		return slices.Concat(base, all), 0, nil
	}
	if eos < 0 {
		return nil, 0, &PrefixError{EOS: eos, Reason: "the tokenizer has none"}
	}
	if prior[len(prior)-1] == eos {
		prior = prior[:len(prior)-1]
	}
	before := countID(base, eos)
	n := before + countID(upTo, eos)
	if n == 0 {
		return nil, 0, &PrefixError{EOS: eos, Reason: "the template shows none up to the end of that message"}
	}
	if n <= before {
		k = nthID(base, eos, n)
		return slices.Concat(prior, base[k:], all), k, nil
	}
	if k = nthID(all, eos, n-before); k < 0 {
		return nil, 0, &PrefixError{EOS: eos, Reason: "the conversation has fewer of them than it has up to that message"}
	}
	return slices.Concat(prior, all[k:]), len(base) + k, nil
}

// countID is how often an id is in a list.
func countID(ids []int32, id int32) (n int) {
	for _, x := range ids {
		if x == id {
			n++
		}
	}
	return n
}

// nthID is the place where an id is for the nth time, -1 if it is not so often.
func nthID(ids []int32, id int32, n int) int {
	for i, x := range ids {
		if x != id {
			continue
		}
		if n--; n == 0 {
			return i
		}
	}
	return -1
}

// commonIDs is the number of ids that two lists begin with alike.
func commonIDs(a, b []int32) (n int) {
	for n < min(len(a), len(b)) && a[n] == b[n] {
		n++
	}
	return n
}

func hasPrefix(ids, prefix []int32) bool {
	return len(ids) >= len(prefix) && slices.Equal(ids[:len(prefix)], prefix)
}
