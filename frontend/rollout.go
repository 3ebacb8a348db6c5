package frontend

import (
	"bytes"
	"encoding/json/jsontext"
	"slices"

	"baton/leg"
	"baton/text"
)

// Rollouts carry ids along with messages: an assistant's message says what the model was given for it and what it sampled,
// and the next turn's ids begin with these, whatever the text of the message would be encoded to.

// rolloutFields are members of messages that no template is shown.
var rolloutFields = []string{"prompt_token_ids", "generation_token_ids", "generation_log_probs"}

// sampledIDs are the rollout fields of a message.
type sampledIDs struct {
	prompt, generation value
	any                bool // null ones too
}

// set notes a member if it is one of the fields.
func (r *sampledIDs) set(name string, m value) bool {
	if !slices.Contains(rolloutFields, name) {
		return false
	}
	r.any = true
	switch {
	case m.kind() == jsontext.KindNull:
	case name == "prompt_token_ids":
		r.prompt = m
	case name == "generation_token_ids":
		r.generation = m
	}
	return true
}

// appendOthers appends a message without the fields.
func (r *sampledIDs) appendOthers(b []byte, message jsontext.Value) []byte {
	if !r.any {
		return append(b, message...)
	}
	b = append(b, '{')
	first := true
	for c := inside(message); c.more(); {
		quoted, m := c.member()
		if name, err := unquoted(quoted); err == nil && slices.Contains(rolloutFields, name) {
			continue
		}
		if !first {
			b = append(b, ',')
		}
		first = false
		b = append(append(append(b, quoted...), ':'), m...)
	}
	return append(b, '}')
}

// check refuses half a bundle: without what was sampled the turn would be lost without a word.
func (r *sampledIDs) check(message string) error {
	switch {
	case r.prompt.raw != nil && r.generation.raw == nil:
		return invalid(message+".generation_token_ids", "%s has prompt_token_ids but no generation_token_ids: send both, or neither", message)
	case r.prompt.raw == nil && r.generation.raw != nil:
		return invalid(message+".prompt_token_ids", "%s has generation_token_ids but no prompt_token_ids: send both, or neither", message)
	}
	return nil
}

// ids are both lists, one behind the other; first are ids that are left out of the prompt's. So many of all are the prompt.
func (r *sampledIDs) ids(vocab int, first []int32) (all []int32, n int, err error) {
	prompt, err := r.prompt.tokenIDs(vocab)
	if err != nil {
		return nil, 0, err
	}
	sampled, err := r.generation.tokenIDs(vocab)
	if n = len(first) + len(prompt); err == nil && n == 0 {
		err = invalid(r.prompt.path, "%s is empty: it is what the model was given", r.prompt.path)
	}
	return slices.Concat(first, prompt, sampled), n, err
}

// idList is an array of token ids as it was written, and they. The zero value is none.
type idList struct {
	raw []byte
	ids []int32
}

// listIn is the list that a chat's prefix was read from, in memory of its own. Its ids are the first of those that the
// conversation was given.
func (c *Chat) listIn(w *writing, ids []int32) idList {
	from, n := c.list.at-(w.end-len(w.added)), c.list.ids
	if c.list.size == 0 || from < 0 || !slices.Equal(ids[:min(n, len(ids))], c.prefix.IDs[:n]) {
		return idList{}
	}
	return idList{w.added[from : from+c.list.size], ids[:n]}
}

// cut is where ids are left out of a list, and as how many bytes they were written.
type cut struct {
	at, size int
	ids      []int32
}

// cutIn looks for a list of a prompt in messages that begins as an earlier one. But for the last one, which may have more digits now,
// those ids need not be read.
func (l idList) cutIn(messages []byte) cut {
	head := l.raw[:bytes.LastIndexByte(l.raw, ',')+1]
	if len(head) < minList {
		return cut{}
	}
	at := arrayAt(messages, `"prompt_token_ids"`)
	if at < 0 || !bytes.HasPrefix(messages[at:], head) {
		return cut{}
	}
	if next := skipSpace(messages, at+len(head)); next == len(messages) || !isDigit(messages[next]) {
		return cut{} // no list ends with a comma
	}
	return cut{at, len(head) - 1, l.ids[:len(l.ids)-1]}
}

// appendAll appends an array of ids that may begin with those of the list, which were written once already.
func (l idList) appendAll(b []byte, ids []int32) []byte {
	n := len(l.ids)
	if n == 0 || n >= len(ids) || &ids[0] != &l.ids[0] && !slices.Equal(ids[:n], l.ids) || hasSpace(l.raw) {
		return appendIDs(b, ids)
	}
	b = slices.Grow(b, len(l.raw)+7*(len(ids)-n))
	b = append(b, l.raw[:len(l.raw)-1]...)
	bracket := len(b)
	b = appendIDs(b, ids[n:])
	b[bracket] = ','
	return b
}

func hasSpace(b []byte) bool {
	for _, c := range []byte(" \n\r\t") {
		if bytes.IndexByte(b, c) >= 0 {
			return true
		}
	}
	return false
}

// setRequiredPrefix takes the ids that the conversation's must begin with, up to the last message of the assistant.
func (c *Chat) setRequiredPrefix(v value, vocab int) (err error) {
	c.required, err = v.tokenIDs(vocab)
	return err
}

// settlePrefix finds the message that required ids are of.
func (c *Chat) settlePrefix() error {
	if len(c.required) == 0 {
		return nil
	}
	if c.lastAnswer < 0 {
		return invalid("required_prefix_token_ids", "required_prefix_token_ids needs a message of the assistant that it ends with")
	}
	c.prefix = text.Prefix{IDs: c.required, Message: c.lastAnswer}
	c.list.size = 0 // the ids are not of a list in the messages
	return nil
}

// is reports whether a message is what was said. Fields that are null, and rollout fields, make no difference.
func (a *said) is(message jsontext.Value) bool {
	v := value{raw: message}
	content, reasoning, calls := "", "", 0
	role, same := "", true
	err := v.members(func(name string, m value) (err error) {
		if m.kind() == jsontext.KindNull || slices.Contains(rolloutFields, name) {
			return nil
		}
		switch name {
		case "role":
			role, err = m.text()
		case "content":
			content, err = contentText(m)
		case "reasoning_content", "reasoning":
			reasoning, err = m.text()
		case "tool_calls":
			err = m.elements("", func(i int, call value) error {
				calls++
				same = same && i < len(a.calls) && isCall(&a.calls[i], call)
				return nil
			})
		case "refusal", "annotations", "audio", "function_call", "id", "status", "type":
		default:
			same = false // a template may show it
		}
		return err
	})
	return err == nil && same && role == "assistant" && content == a.content && reasoning == a.reasoning && calls == len(a.calls)
}

// contentText is the text of a message's content: a string, or one part with text.
func contentText(v value) (s string, err error) {
	if v.kind() == jsontext.KindString {
		return v.text()
	}
	err = v.elements("", func(i int, part value) error {
		if i > 0 {
			return errNotText
		}
		return part.members(func(name string, m value) (err error) {
			if name == "text" {
				s, err = m.text()
			}
			return err
		})
	})
	return s, err
}

var errNotText = invalid("", "several parts")

// isCall reports whether a call comes back. Its arguments may be spelled otherwise.
func isCall(c *text.ToolCall, v value) bool {
	same, named := true, false
	err := v.members(func(name string, m value) (err error) {
		switch name {
		case "id":
			var id string
			id, err = m.text()
			same = same && id == c.ID
		case "function":
			return m.members(func(name string, m value) (err error) {
				switch name {
				case "name":
					var s string
					s, err = m.text()
					same, named = same && s == c.Name, true
				case "arguments":
					same = same && isArguments(c.Arguments, m)
				}
				return err
			})
		}
		return err
	})
	return err == nil && same && named
}

func isArguments(said string, v value) bool {
	back := v.raw
	if v.kind() == jsontext.KindString {
		s, err := v.text()
		if err != nil {
			return false
		}
		if s == said {
			return true
		}
		back = jsontext.Value(s)
	}
	back, own := slices.Clone(back), jsontext.Value(said)
	return back.Compact() == nil && own.Compact() == nil && bytes.Equal(back, own)
}

// appendRollout appends the rollout fields of an answer's message: all three or none.
func (a *answer) appendRollout(b []byte, c *choice) []byte {
	if !a.rollout() || c.finish == leg.FinishNotFinished {
		return b
	}
	var known idList
	if c.g.turn != nil {
		known = c.g.turn.list
	}
	b = append(b, `,"prompt_token_ids":`...)
	b = known.appendAll(b, c.prompt.ids)
	b = append(b, `,"generation_token_ids":[`...)
	for i := range c.pending.logprobs {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendInt(b, c.pending.logprobs[i].id)
	}
	b = append(b, `],"generation_log_probs":[`...)
	for i := range c.pending.logprobs {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendFloat32(b, c.pending.logprobs[i].logprob)
	}
	return append(b, ']')
}

// rollout reports whether messages carry ids: the client takes tokens for ids, as NeMo Gym does, and wants their
// log-probabilities.
func (g *generation) rollout() bool {
	return g.chat && !g.stream && g.sampling.Logprobs && g.tokensAsIDs
}
