package text

import (
	"bytes"
	"context"
	"encoding/json/jsontext"
	"errors"
	"slices"
	"strings"

	"github.com/ardanlabs/jinja"
)

// rendering is one turn under way.
type rendering struct {
	t    *Tokenizer
	tm   *Template
	chat Chat
	// trial is for finding out whether windows may be used: they are, whether or not they fit, and there are no ids.
	trial bool

	ends   []int
	shapes []messageShape
	picked int // messages of the window when it was picked

	// What is decoded for the template: variables, and the messages that are rendered.
	mark  string
	vars  map[string]jinja.Value
	items []jinja.Value
}

// scan finds the messages behind those that are known and end at byte from of the array.
func (r *rendering) scan(known []int, from int) (fresh [][]byte, err error) {
	r.ends = slices.Clip(known)
	raw := bytes.Trim(r.chat.Messages, whiteSpace)
	r.chat.Messages = bytes.Clone(raw)
	if from == 0 {
		if len(raw) == 0 || raw[0] != '[' {
			return nil, r.tm.failure(errors.New("messages: want an array"))
		}
		from = 1
	}
	rest := raw[from:]
	if len(known) > 0 {
		rest = bytes.TrimPrefix(bytes.TrimLeft(rest, whiteSpace), []byte{','})
	}
	skipped := len(raw) - len(rest) - 1
	list := slices.Concat([]byte{'['}, rest)
	d := jsontext.NewDecoder(bytes.NewBuffer(list), readOptions)
	if _, err := d.ReadToken(); err != nil {
		return nil, r.badMessages(err)
	}
	for d.PeekKind() != ']' {
		v, err := d.ReadValue()
		if err != nil {
			return nil, r.badMessages(err)
		}
		r.ends = append(r.ends, skipped+int(d.InputOffset()))
		fresh = append(fresh, bytes.Clone(v))
	}
	if _, err := d.ReadToken(); err != nil {
		return nil, r.badMessages(err)
	}
	if int(d.InputOffset()) < len(list) {
		return nil, r.badMessages(errors.New("more than one JSON value"))
	}
	return fresh, nil
}

func (r *rendering) badMessages(err error) error {
	return r.tm.failure(errors.New("messages: " + err.Error()))
}

// message is the JSON of one of a script's messages.
func (s *Script) message(i int) []byte {
	from := 1
	if i > 0 {
		from = s.ends[i-1]
	}
	return bytes.TrimLeft(s.chat.Messages[from:s.ends[i]], whiteSpace+",")
}

// decode makes the template's variables with these messages.
func (r *rendering) decode(list [][]byte) error {
	c := r.chat
	c.Messages = slices.Concat([]byte{'['}, bytes.Join(list, []byte{','}), []byte{']'})
	m, vars, err := r.tm.decode(c)
	if err != nil {
		return r.tm.failure(err)
	}
	r.mark, r.vars, r.items = m.mark, vars, vars["messages"].AsList().Items
	return nil
}

// render renders the first n of the decoded messages.
func (r *rendering) render(ctx context.Context, n int, generationPrompt bool) (Prompt, error) {
	vars := make(map[string]jinja.Value, len(r.vars)+8)
	for name, v := range r.vars {
		vars[name] = v
	}
	items := slices.Clone(r.items[:n])
	if r.tm.mutates {
		for i := range items {
			items[i] = copyValue(items[i])
		}
	}
	vars["messages"] = jinja.NewList(items)
	vars["add_generation_prompt"] = jinja.NewBool(generationPrompt)
	text, err := r.tm.execute(ctx, vars, r.chat.Now)
	return unmark(text, r.mark), err
}

// copyValue copies lists and dictionaries, which a template may change.
func copyValue(v jinja.Value) jinja.Value {
	switch {
	case v.IsList():
		items := slices.Clone(v.AsList().Items)
		for i := range items {
			items[i] = copyValue(items[i])
		}
		return jinja.NewList(items)
	case v.IsDict():
		out := jinja.NewDict()
		for _, name := range v.AsDict().Keys {
			out.AsDict().Set(name, copyValue(v.AsDict().Data[name]))
		}
		return out
	}
	return v
}

// whole renders all messages. prev may help to encode them.
func (r *rendering) whole(ctx context.Context, prev *Script, p Prefix, reuse *Reuse) (*Script, error) {
	list, err := r.scan(nil, 0)
	if err != nil {
		return nil, err
	}
	if err := r.decode(list); err != nil {
		return nil, err
	}
	r.shapes = r.tm.shapesOf(r.items)
	prompt, err := r.render(ctx, len(list), r.chat.AddGenerationPrompt)
	if err != nil {
		return nil, err
	}
	s := r.script(prompt)
	var shown Prompt
	base := r.t.prefixOf(prev, prompt)
	if len(p.IDs) > 0 && !hasPrefix(base.ids, p.IDs) {
		if p.Message < 0 || p.Message >= len(list) {
			return nil, &PrefixError{Message: p.Message, EOS: r.t.special.EOS, Reason: "there is no such message"}
		}
		if shown, err = r.render(ctx, p.Message+1, false); err != nil {
			return nil, err
		}
	}
	if err := r.encode(s, base, shown, p, reuse); err != nil {
		return nil, err
	}
	return s, r.open(ctx, s, list)
}

// script begins a Script.
func (r *rendering) script(prompt Prompt) *Script {
	c := r.chat // its messages are a copy already
	c.Tools, c.Documents, c.Extra = bytes.Clone(c.Tools), bytes.Clone(c.Documents), bytes.Clone(c.Extra)
	return &Script{template: r.tm, chat: c, ends: r.ends, shapes: r.shapes, prompt: prompt}
}

// local reports whether windows may be used.
func (r *rendering) local() bool { return r.trial || r.tm.local() }

// open makes a script that was rendered as a whole ready to be followed.
func (r *rendering) open(ctx context.Context, s *Script, list [][]byte) error {
	s.body, s.why = -1, Unstable
	if len(list) == 0 {
		return nil
	}
	s.window = window(r.shapes, len(list))
	s.picked = len(s.window)
	some := len(s.window) < len(list)
	switch {
	case len(s.window) > maxWindow:
		s.why = LongTurn
		return nil
	case some && !r.local():
		return nil
	case some:
		picked := make([][]byte, len(s.window))
		for k, i := range s.window {
			picked[k] = list[i]
		}
		if err := r.decode(picked); err != nil {
			return err
		}
	}
	asked := s.prompt
	if some {
		var err error
		if asked, err = r.render(ctx, len(r.items), s.chat.AddGenerationPrompt); err != nil {
			return soft(err)
		}
	}
	if err := r.close(ctx, s, asked.Text); err != nil {
		return err
	}
	if some && s.body >= 0 && !r.seamHolds(s.prompt.Text[:s.body], s.windowText, 0) {
		s.body = -1
	}
	return nil
}

// close finds where a script's generation prompt begins. asked is its window's text with one.
func (r *rendering) close(ctx context.Context, s *Script, asked string) error {
	last := s.shapes[len(s.shapes)-1]
	open, known := "", !s.chat.AddGenerationPrompt
	for _, o := range s.opens {
		if o.after == last {
			open, known = o.text, true
		}
	}
	s.body, s.why = -1, Unstable
	if !known {
		shown, err := r.render(ctx, len(r.items), false)
		if err != nil {
			return soft(err) // a template may insist on a generation prompt
		}
		if open, known = strings.CutPrefix(asked, shown.Text); !known {
			return nil
		}
		s.opens = append(slices.Clip(s.opens), opening{last, open})
	}
	var ok bool
	if s.windowText, ok = strings.CutSuffix(asked, open); ok && strings.HasSuffix(s.prompt.Text, open) {
		s.body = len(s.prompt.Text) - len(open)
	}
	return nil
}

// soft drops a template's complaint about what the client did not ask for.
func soft(err error) error {
	var e *TemplateError
	if errors.As(err, &e) && !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
		return nil
	}
	return err
}

// extend renders what follows prev. A reason other than Extended is that this cannot be done.
func (r *rendering) extend(ctx context.Context, prev *Script, p Prefix, reuse *Reuse) (*Script, Reason, error) {
	fresh, err := r.scan(prev.ends, prev.end())
	if err != nil {
		return nil, Extended, err
	}
	if len(fresh) == 0 {
		if len(p.IDs) > 0 && !hasPrefix(prev.ids, p.IDs) {
			return nil, Edited, nil
		}
		reuse.Text, reuse.IDs = len(prev.prompt.Text), len(prev.ids)
		return prev, Extended, nil
	}
	win, winText, why, err := r.window(prev, fresh)
	if err != nil || why != Extended {
		return nil, why, err
	}
	all := len(win) == len(prev.shapes)
	if winText == "" && all {
		winText = prev.prompt.Text[:prev.body]
	} else if winText == "" {
		shown, err := r.render(ctx, len(win), false)
		if err != nil {
			return nil, Seam, soft(err)
		}
		winText = shown.Text
	}
	asked, err := r.render(ctx, len(r.items), r.chat.AddGenerationPrompt)
	switch {
	case err != nil && all:
		return nil, Extended, err
	case err != nil:
		return nil, Seam, soft(err)
	}
	old := prev.prompt.cut(prev.body)
	prompt, kept, ok := r.join(old, winText, asked)
	if !ok {
		return nil, Seam, nil
	}
	s := r.script(prompt)
	s.window, s.picked, s.opens = win, r.picked, prev.opens
	for i := len(prev.shapes); i < len(r.shapes); i++ {
		s.window = append(s.window, i)
	}
	var shown Prompt
	base := r.t.prefixOf(prev, prompt)
	if len(p.IDs) > 0 && !hasPrefix(base.ids, p.IDs) {
		at := p.Message + 1 - len(prev.shapes)
		if at <= 0 || at > len(fresh) {
			return nil, Edited, nil // the ids are news of an old message
		}
		if shown, err = r.render(ctx, len(win)+at, false); err != nil {
			return nil, Seam, soft(err)
		}
		if shown, _, ok = r.join(old, winText, shown); !ok {
			return nil, Seam, nil
		}
	}
	reuse.Text = kept
	if err := r.encode(s, base, shown, p, reuse); err != nil {
		return nil, Extended, err
	}
	return s, Extended, r.close(ctx, s, asked.Text)
}

// window picks the old messages behind which the fresh ones are rendered and decodes both. Its text is empty when it is
// not known.
func (r *rendering) window(prev *Script, fresh [][]byte) (win []int, text string, why Reason, err error) {
	decode := func() error {
		list := make([][]byte, 0, len(win)+len(fresh))
		for _, i := range win {
			list = append(list, prev.message(i))
		}
		return r.decode(append(list, fresh...))
	}
	win, text, r.picked = slices.Clip(prev.window), prev.windowText, prev.picked
	if err := decode(); err != nil {
		return nil, "", Extended, err
	}
	added := r.tm.shapesOf(r.items[len(win):])
	r.shapes = slices.Concat(prev.shapes, added)
	need := mustKeep(prev.shapes, added)
	if len(win) <= prev.picked+maxGrowth && keeps(win, need, len(prev.shapes)) {
		return win, text, Extended, nil
	}
	picked := window(prev.shapes, need)
	switch {
	case len(picked) > maxWindow:
		return nil, "", LongTurn, nil
	case len(picked) < len(prev.shapes) && !r.local():
		return nil, "", Unstable, nil
	case slices.Equal(picked, win):
		return win, text, Extended, nil
	}
	r.picked = len(picked)
	win = slices.Clip(picked)
	return win, "", Extended, decode()
}

// cut is the first n bytes of a prompt.
func (p Prompt) cut(n int) Prompt {
	at, _ := slices.BinarySearch(p.plain, n+1)
	return Prompt{p.Text[:n], p.plain[:at]}
}

// minSeam is how many bytes before a seam must agree, where there are as many.
const minSeam = 64

// seamHolds reports whether a text ends as its window does: in the last bytes, which changed since, and some before them.
func (r *rendering) seamHolds(text, window string, changed int) bool {
	want := min(changed+minSeam, len(window))
	if r.trial {
		want = changed
	}
	return len(text) >= want && text[len(text)-want:] == window[len(window)-want:]
}

// join puts what a window's text goes on with behind the old text: more begins as window does, and old ends as it does.
// kept is how much of old stays.
func (r *rendering) join(old Prompt, window string, more Prompt) (out Prompt, kept int, ok bool) {
	same := commonPrefix(window, more.Text)
	changed := len(window) - same
	if !r.seamHolds(old.Text, window, changed) {
		return out, 0, false
	}
	kept = len(old.Text) - changed
	out.Text = old.Text[:kept] + more.Text[same:]
	for _, at := range old.plain {
		if at <= kept {
			out.plain = append(out.plain, at)
		}
	}
	for _, at := range more.plain {
		if at > same {
			out.plain = append(out.plain, at-same+kept)
		}
	}
	return out, kept, true
}
