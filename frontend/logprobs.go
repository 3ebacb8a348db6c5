package frontend

import (
	"slices"
	"strings"
)

// candidate is one token in a list of alternatives.
type candidate struct {
	id      int32
	logprob float32
	rank    int // 1 is the likeliest; 0 when it is not among those that were reported
}

// candidates lists the k likeliest tokens in t's place, best first, and after them t itself when it is
// not one of them.
func (t *tokenLogprob) candidates(buf []candidate, k int) []candidate {
	buf = buf[:0]
	chosen := candidate{id: t.id, logprob: t.logprob}
	listed := false
	for i, id := range t.top.IDs {
		if i < k {
			buf = append(buf, candidate{id: id, logprob: t.top.Logprobs[i], rank: i + 1})
			listed = listed || id == t.id
		} else if id == t.id {
			chosen.rank = i + 1
		}
	}
	if !listed {
		buf = append(buf, chosen)
	}
	return buf
}

// tokenString is what clients see of a token in logprobs.
func (g *generation) tokenString(tok Tokenizer, id int32) string {
	if g.tokensAsIDs {
		return string(idTokenizer{}.TokenBytes(id))
	}
	return strings.ToValidUTF8(string(tok.TokenBytes(id)), "\uFFFD")
}

// appendChatLogprobs appends the logprobs object of a chat choice.
func (g *generation) appendChatLogprobs(b []byte, tok Tokenizer, tokens []tokenLogprob) []byte {
	b = append(b, `{"content":[`...)
	var buf []candidate
	for i := range tokens {
		t := &tokens[i]
		if i > 0 {
			b = append(b, ',')
		}
		b = g.appendChatToken(b, tok, t.id, t.logprob)
		b = append(b, `,"top_logprobs":[`...)
		if g.topLogprobs > 0 {
			buf = t.candidates(buf, g.topLogprobs)
			for j, c := range buf[:min(len(buf), g.topLogprobs)] {
				if j > 0 {
					b = append(b, ',')
				}
				b = append(g.appendChatToken(b, tok, c.id, c.logprob), '}')
			}
		}
		b = append(b, "]}"...)
	}
	return append(b, `],"refusal":null}`...)
}

// appendChatToken appends an object without its closing brace.
func (g *generation) appendChatToken(b []byte, tok Tokenizer, id int32, logprob float32) []byte {
	b = append(b, `{"token":`...)
	b = appendString(b, g.tokenString(tok, id))
	b = append(b, `,"logprob":`...)
	b = appendFloat32(b, logprob)
	b = append(b, `,"bytes":[`...)
	for i, c := range tok.TokenBytes(id) {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendInt(b, int(c))
	}
	return append(b, ']')
}

// appendLegacyLogprobs appends the logprobs object of a completion choice: four parallel arrays.
func (g *generation) appendLegacyLogprobs(b []byte, tok Tokenizer, tokens []tokenLogprob) []byte {
	list := func(name string, one func(b []byte, t *tokenLogprob) []byte) {
		b = append(b, name...)
		for i := range tokens {
			if i > 0 {
				b = append(b, ',')
			}
			b = one(b, &tokens[i])
		}
		b = append(b, ']')
	}
	list(`{"tokens":[`, func(b []byte, t *tokenLogprob) []byte {
		return appendString(b, g.tokenString(tok, t.id))
	})
	list(`,"token_logprobs":[`, func(b []byte, t *tokenLogprob) []byte {
		if t.missing {
			return append(b, "null"...)
		}
		return appendFloat32(b, t.logprob)
	})
	var buf []candidate
	list(`,"top_logprobs":[`, func(b []byte, t *tokenLogprob) []byte {
		if t.missing {
			return append(b, "null"...)
		}
		buf = t.candidates(buf, g.topLogprobs)
		return g.appendTopMap(b, tok, buf)
	})
	list(`,"text_offset":[`, func(b []byte, t *tokenLogprob) []byte { return appendInt(b, t.offset) })
	return append(b, '}')
}

// appendTopMap appends {token string: logprob}. Of tokens with the same string the likeliest stays.
func (g *generation) appendTopMap(b []byte, tok Tokenizer, list []candidate) []byte {
	b = append(b, '{')
	names := make([]string, 0, len(list))
	for _, c := range list {
		name := g.tokenString(tok, c.id)
		if slices.Contains(names, name) {
			continue
		}
		if len(names) > 0 {
			b = append(b, ',')
		}
		names = append(names, name)
		b = append(appendString(b, name), ':')
		b = appendFloat32(b, c.logprob)
	}
	return append(b, '}')
}

// appendPromptLogprobs appends vLLM's prompt_logprobs: null for the first token, then for each
// {"id": {"logprob", "rank", "decoded_token"}}. The rank of a token beyond those asked for is null.
func (g *generation) appendPromptLogprobs(b []byte, tok Tokenizer, tokens []tokenLogprob) []byte {
	b = append(b, '[')
	var buf []candidate
	for i := range tokens {
		if i > 0 {
			b = append(b, ',')
		}
		if tokens[i].missing {
			b = append(b, "null"...)
			continue
		}
		buf = tokens[i].candidates(buf, g.promptLogprobs)
		b = append(b, '{')
		for j, c := range buf {
			if j > 0 {
				b = append(b, ',')
			}
			b = append(appendInt(append(b, '"'), c.id), `":{"logprob":`...)
			b = appendFloat32(b, c.logprob)
			b = append(b, `,"rank":`...)
			if c.rank > 0 {
				b = appendInt(b, c.rank)
			} else {
				b = append(b, "null"...)
			}
			b = append(b, `,"decoded_token":`...)
			b = append(appendString(b, g.tokenString(tok, c.id)), '}')
		}
		b = append(b, '}')
	}
	return append(b, ']')
}
