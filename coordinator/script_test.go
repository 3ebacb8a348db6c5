package coordinator

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"baton/kvcache"
	"baton/route"
	"baton/wire"
)

// The scripts in testdata play the protocol: each command is something that happens, below it stands
// what the core does about it. See script.command for the commands.
func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		var s *script
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			if d.Cmd == "new" || s == nil {
				s = newScript(t, d)
			}
			return s.run(t, d)
		})
	})
}

type script struct {
	core  *Core
	now   time.Time
	ids   map[string]PeerID
	names map[PeerID]string
	peers PeerID

	explain bool // why engines were chosen
}

func newScript(t *testing.T, d *datadriven.TestData) *script {
	cfg, explain := Config{Incarnation: 1}, false
	for _, a := range d.CmdArgs {
		var err error
		switch a.Key {
		case "policy":
			cfg.Policy, err = route.ByName(a.Vals[0])
		case "queue":
			a.Scan(t, 0, &cfg.Queue)
		case "max-prompt":
			a.Scan(t, 0, &cfg.MaxPrompt)
		case "explain":
			explain = true
		case "held":
			a.Scan(t, 0, &cfg.HeldTokens)
		}
		if err != nil {
			d.Fatalf(t, "%v", err)
		}
	}
	core, err := New(cfg)
	if err != nil {
		d.Fatalf(t, "%v", err)
	}
	return &script{explain: explain, core: core, now: time.Unix(0, 0), ids: map[string]PeerID{}, names: map[PeerID]string{}}
}

// args reads the named arguments of a command.
type args map[string]string

func (a args) int(key string, def int) int {
	if v, ok := a[key]; ok {
		n, err := strconv.Atoi(v)
		if err != nil {
			panic(err)
		}
		return n
	}
	return def
}

func (a args) tokens(key string) wire.Tokens {
	var out wire.Tokens
	for f := range strings.FieldsSeq(strings.ReplaceAll(a[key], ",", " ")) {
		n, err := strconv.Atoi(f)
		if err != nil {
			panic(err)
		}
		out = append(out, int32(n))
	}
	return out
}

// ranks reads what each of an engine's ranks holds, as in "0-1:0-3/0-1:4-7" (layers:heads); by default one holds all.
func (a args) ranks(name string) (ranks []wire.RankInfo) {
	for text := range strings.SplitSeq(a["ranks"], "/") {
		r := wire.RankInfo{Rank: len(ranks), Transport: []byte(name)}
		if a["ranks"] != "" {
			var layer, head int
			if _, err := fmt.Sscanf(text, "%d-%d:%d-%d", &r.Layer, &layer, &r.Head, &head); err != nil {
				panic(err)
			}
			r.Layers, r.Heads = layer-r.Layer+1, head-r.Head+1
		}
		ranks = append(ranks, r)
	}
	return ranks
}

func (s *script) run(t *testing.T, d *datadriven.TestData) string {
	a, from := args{}, ""
	for i, arg := range d.CmdArgs {
		switch {
		case i == 0 && len(arg.Vals) == 0:
			from = arg.Key
		case len(arg.Vals) == 0:
			a[arg.Key] = "true"
		default:
			a[arg.Key] = strings.Join(arg.Vals, ",")
		}
	}
	switch d.Cmd {
	case "new":
		return ""
	case "wait":
		dur, err := time.ParseDuration(from)
		if err != nil {
			d.Fatalf(t, "%v", err)
		}
		s.now = s.now.Add(dur)
		return s.step(Event{})
	case "deadline":
		if at, ok := s.core.Deadline(); ok {
			return fmt.Sprintf("in %v\n", at.Sub(s.now))
		}
		return "none\n"
	case "status":
		return describeStatus(s.core.Status())
	case "client", "engine":
		return s.join(d.Cmd, from, a)
	case "close":
		return s.step(Event{Peer: s.ids[from]})
	}
	id, ok := s.ids[from]
	if !ok {
		id = 1 << 20 // a connection that the core never heard of
	}
	return s.step(Event{Peer: id, Message: s.command(t, d, from, a)})
}

// join connects a peer, and registers it if it is an engine.
func (s *script) join(kind, name string, a args) string {
	s.peers++
	s.ids[name], s.names[s.peers] = s.peers, name
	if as, ok := a["as"]; ok {
		name = as
	}
	inc := uint64(a.int("incarnation", int(s.peers)))
	hello := s.step(Event{Peer: s.peers, Message: &wire.Connect{
		Version: wire.Version, Kind: kind, Name: name, Incarnation: inc, Model: a["model"], Fingerprint: a["model"],
	}})
	if kind == KindClient || a["role"] == "" {
		return hello
	}
	m := &wire.RegisterRole{
		Role: a["role"], Name: name, Incarnation: inc, Model: "tiny", Transport: "tcp", Logprobs: a["reports"],
		Geometry: wire.Geometry{
			Model: cmp.Or(a["model"], "f00d"), BlockSize: a.int("block", 4), Layers: 2, KVHeads: a.int("heads", 8), HeadDim: 64, Planes: 2,
			KVDType: "bf16", VocabSize: 100, MaxSeqLen: a.int("max-seq", 64),
			VerifyHandoff: a["verify"],
		},
		Requests: a.int("requests", 4), Blocks: a.int("blocks", 32), Continuation: a.int("continuation", 0), WeightVersion: uint64(a.int("version", 1)),
		Ranks: a.ranks(name),
	}
	if tr, ok := a["transport"]; ok {
		m.Transport = tr
	}
	return s.step(Event{Peer: s.peers, Message: m})
}

// command makes the message of a command. The prompt of n tokens counts from the text's number on, so
// equal texts share prefixes.
func (s *script) command(t *testing.T, d *datadriven.TestData, from string, a args) wire.Message {
	id := uint64(a.int("id", 0))
	switch d.Cmd {
	case "submit":
		m := &wire.SubmitRequest{ID: id, Salt: a["salt"], Session: a["session"], Resume: a.tokens("resume")}
		m.Sampling.MaxTokens, m.Sampling.MinTokens = a.int("max", 4), a.int("min", 0)
		m.Sampling.PromptLogprobs = a["logprobs"] != ""
		for i := range a.int("prompt", 8) {
			m.Prompt = append(m.Prompt, int32(a.int("text", 0)*1000+i))
		}
		return m
	case "abort":
		return &wire.AbortRequest{ID: id}
	case "reply", "partial":
		r := wire.Result{
			ID: id, Start: a.int("start", 0), Tokens: a.tokens("tokens"), Finish: a["finish"],
			PromptTokens: a.int("prompt", 0), CachedTokens: a.int("cached", 0),
		}
		if h := a.int("export", 0); h != 0 {
			r.Export = &wire.Export{Handoff: uint64(h), Capability: []byte("cap"), Blocks: a.tokens("blocks"), Tokens: a.int("prompt", 0)}
		}
		if _, ok := a["stats"]; ok {
			r.Stats = &wire.Stats{Engine: from}
		}
		if _, ok := a["logprobs"]; ok {
			r.Logprobs = make(wire.Floats, len(r.Tokens))
			for i := range r.Logprobs {
				r.Logprobs[i] = -float32(r.Tokens[i])
			}
		}
		if d.Cmd == "reply" {
			return &wire.EngineReply{Results: []wire.Result{r}}
		}
		return &wire.EngineReplyPartial{Results: []wire.Result{r}}
	case "ready":
		return &wire.KVTransferReady{ID: id, CachedBlocks: a.int("cached", 0), Blocks: a.tokens("blocks"), Tag: []byte("tag")}
	case "read-done":
		return &wire.KVReadDone{ID: id}
	case "aborted":
		return &wire.RequestAborted{ID: id, SourceSafe: a["unsafe"] == ""}
	case "error":
		m := &wire.RequestError{
			ID: id, Code: wire.CodeUnavailable, Message: "it broke", Retryable: a["final"] == "", SourceSafe: a["unsafe"] == "",
			Reader: uint64(a.int("reader", 0)),
		}
		if code, ok := a["code"]; ok {
			m.Code = code
		}
		return m
	case "holds":
		return s.events(a)
	case "leave":
		return &wire.Disconnect{Reason: "scaled down"}
	case "pause":
		return &wire.Pause{}
	case "unpause":
		return &wire.Unpause{}
	case "suspend":
		return &wire.Suspend{}
	case "resume":
		return &wire.Resume{}
	case "stop":
		return &wire.Stop{}
	case "shutdown":
		return &wire.Shutdown{}
	case "epoch":
		return &wire.SetGenerationEpoch{Epoch: id}
	case "profile":
		return &wire.StartProfiler{Path: "p"}
	case "unknown":
		return &wire.Unknown{Of: 200}
	}
	d.Fatalf(t, "no command %q", d.Cmd)
	return nil
}

// events makes a report of cached prefixes: stored, or with "gone" removed, are the first of the blocks of the
// text's prompt from number from on.
func (s *script) events(a args) wire.Message {
	m := &wire.KVEvents{Sequence: uint64(a.int("seq", 0)), Reset: a["reset"] != ""}
	var prompt wire.Tokens
	for i := range 4 * a.int("blocks", 0) {
		prompt = append(prompt, int32(a.int("text", 0)*1000+i))
	}
	var parent [32]byte
	for i, d := range kvcache.Chain(kvcache.Root(a["salt"], ""), 4, prompt) {
		if i >= a.int("from", 0) {
			ev := wire.KVEvent{Kind: wire.KVStored, Digest: d, Parent: parent, Version: uint64(a.int("version", 1))}
			if a["gone"] != "" {
				ev.Kind, ev.Parent = wire.KVRemoved, [32]byte{}
			}
			m.Events = append(m.Events, ev)
		}
		parent = d
	}
	if a["gone"] != "" {
		slices.Reverse(m.Events)
	}
	if a["cleared"] != "" {
		m.Events = []wire.KVEvent{{Kind: wire.KVCleared}}
	}
	if m.Next = m.Sequence; !m.Reset && a["part"] == "" {
		m.Next += uint64(len(m.Events))
	}
	return m
}

func (s *script) step(ev Event) string {
	ev.At = s.now
	var b strings.Builder
	for _, a := range s.core.Step(ev) {
		switch a.Kind {
		case Send:
			fmt.Fprintf(&b, "%s <- %s\n", s.names[a.Peer], describe(a.Message))
		case Close:
			fmt.Fprintf(&b, "close %s: %s\n", s.names[a.Peer], a.Text)
		case Note:
			fmt.Fprintf(&b, "note: %s\n", a.Text)
		case Warn:
			fmt.Fprintf(&b, "warn: %s\n", a.Text)
		case Exit:
			fmt.Fprintf(&b, "exit: %s\n", a.Text)
		case End:
			q := a.Summary
			fmt.Fprintf(&b, "end of %d (%s's %d): %s", q.ID, q.Client, q.ClientID, q.Outcome)
			if q.Prefill != "" {
				fmt.Fprintf(&b, ", prefill %s", q.Prefill)
			}
			if q.Decode != "" {
				fmt.Fprintf(&b, ", decode %s", q.Decode)
			}
			fmt.Fprintf(&b, ", %d tokens", q.Generated)
			if s.explain {
				fmt.Fprintf(&b, ", %d cached where %d were predicted", q.CachedTokens, q.PredictedTokens)
				for _, d := range []route.Decision{q.PrefillRoute, q.DecodeRoute} {
					if d.Policy != "" {
						fmt.Fprintf(&b, ", %s", d)
					}
				}
			}
			for _, n := range q.recoveries() {
				if n.count > 0 {
					fmt.Fprintf(&b, ", %d %s", n.count, n.what)
				}
			}
			b.WriteString("\n")
		}
	}
	if b.Len() == 0 {
		return "nothing\n"
	}
	return b.String()
}

func ints(t wire.Tokens) string {
	return strings.ReplaceAll(fmt.Sprint([]int32(t)), " ", ",")
}

// describe prints what matters of a message on one line.
func describe(m wire.Message) string {
	switch m := m.(type) {
	case *wire.Disconnect:
		return "Disconnect: " + m.Reason
	case *wire.RegisterRoleAck:
		if m.Error != "" {
			return "RegisterRoleAck: " + m.Error
		}
	case *wire.SubmitRequest:
		s := fmt.Sprintf("SubmitRequest %d: %d prompt tokens", m.ID, len(m.Prompt))
		if len(m.Resume) > 0 {
			s += ", resume " + ints(m.Resume)
		}
		if m.Handoff {
			s += ", handoff"
		}
		if m.Sampling.PromptLogprobs {
			s += ", prompt logprobs"
		}
		return s
	case *wire.SubmitRequestWithKV:
		return fmt.Sprintf("SubmitRequestWithKV %d: %d prompt tokens, generated %s, from %s (incarnation %d, rank 0 at %q) handoff %d blocks %s",
			m.ID, len(m.Prompt), ints(m.Generated), m.Source.Engine, m.Source.Incarnation, m.Source.Ranks[0].Transport,
			m.Source.Export.Handoff, ints(m.Source.Export.Blocks))
	case *wire.EngineReply:
		return "EngineReply" + describeResults(m.Results)
	case *wire.EngineReplyPartial:
		return "EngineReplyPartial" + describeResults(m.Results)
	case *wire.AbortRequest:
		return fmt.Sprintf("AbortRequest %d", m.ID)
	case *wire.RequestAborted:
		return fmt.Sprintf("RequestAborted %d", m.ID)
	case *wire.ReleaseKV:
		s := fmt.Sprintf("ReleaseKV %d: handoff %d", m.ID, m.Handoff)
		if m.Corrupt {
			s += ", which is corrupt"
		}
		return s
	case *wire.SendKV:
		return fmt.Sprintf("SendKV %d: handoff %d, %d cached, to blocks %s, tag %s, rank 0 at %q",
			m.ID, m.Handoff, m.CachedBlocks, ints(m.Blocks), m.Tag, m.Ranks[0].Transport)
	case *wire.RequestError:
		s := fmt.Sprintf("RequestError %d: %s", m.ID, m.Code)
		if m.Field != "" {
			s += " in " + m.Field
		}
		if m.Retryable {
			s += ", retryable"
		}
		return s + ": " + m.Message
	case *wire.SetGenerationEpoch:
		return fmt.Sprintf("SetGenerationEpoch %d", m.Epoch)
	case *wire.KVResync:
		return fmt.Sprintf("KVResync: expected %d", m.Expected)
	case *wire.StatusReply:
		return "StatusReply: " + describeStatus(m)
	}
	return m.Header().String()
}

func describeResults(results []wire.Result) string {
	var b strings.Builder
	for _, r := range results {
		fmt.Fprintf(&b, " %d: %s from %d", r.ID, ints(r.Tokens), r.Start)
		if r.Logprobs != nil {
			fmt.Fprintf(&b, ", logprobs %v", r.Logprobs)
		}
		if r.Finish != "" {
			fmt.Fprintf(&b, ", %s", r.Finish)
		}
		if r.PromptTokens > 0 {
			fmt.Fprintf(&b, ", %d/%d prompt tokens cached", r.CachedTokens, r.PromptTokens)
		}
		if r.Stats != nil {
			fmt.Fprintf(&b, ", stats of %s", r.Stats.Engine)
		}
		if r.Export != nil {
			b.WriteString(", an export that is none of the client's business")
		}
	}
	return b.String()
}

func describeStatus(st *wire.StatusReply) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s, ready %v", st.Phase, st.Ready)
	if st.Reason != "" {
		fmt.Fprintf(&b, " (%s)", st.Reason)
	}
	fmt.Fprintf(&b, ", %d requests", st.Requests)
	for _, q := range st.Queues {
		fmt.Fprintf(&b, ", %d wait for %s", q.Length, q.Role)
	}
	b.WriteString("\n")
	for _, e := range st.Engines {
		fmt.Fprintf(&b, "  %s: %d/%d requests, %d/%d blocks", e.Name, e.RequestsInUse, e.Requests, e.BlocksReserved, e.Blocks)
		if e.Draining {
			b.WriteString(", draining")
		}
		b.WriteString("\n")
	}
	return b.String()
}

// checkIdle says what a core without work still holds.
func checkIdle(c *Core) error {
	if n := len(c.requests); n > 0 {
		return fmt.Errorf("%d requests are left: %+v", n, *sorted(c.requests)[0])
	}
	if n := c.entry.queue.length + c.decode.queue.length; n > 0 || c.entry.queue.head != nil || c.decode.queue.tail != nil {
		return fmt.Errorf("%d requests are queued", n)
	}
	for _, e := range c.order {
		if len(e.legs) != 0 || e.blocks != 0 {
			return fmt.Errorf("engine %s has legs %v and %d blocks reserved", e.reg.Name, e.legs, e.blocks)
		}
	}
	if c.held != 0 {
		return fmt.Errorf("%d tokens are held", c.held)
	}
	for _, p := range sorted(c.peers) {
		if len(p.requests) > 0 {
			return fmt.Errorf("%s still has requests %v", p, slices.Sorted(maps.Keys(p.requests)))
		}
	}
	return nil
}
