package leg

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"baton/wire"
)

// The scripts in testdata play the two sides of handoffs without a coordinator: each command is something that happens
// to the core of a prefill process (P), of a decode process (D) or of a colocated one (B), below it stands what that core
// does about it.
func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		s := &script{cores: map[string]*Core{}, states: map[uint64][]byte{}, now: time.Unix(1000, 0)}
		datadriven.RunTest(t, path, s.run)
	})
}

type script struct {
	t      *testing.T
	cores  map[string]*Core
	states map[uint64][]byte // that were delivered, by the number of their job
	now    time.Time
}

var roles = map[string]string{"P": wire.RolePrefill, "D": wire.RoleDecode, "B": wire.RoleBoth}

func (s *script) run(t *testing.T, d *datadriven.TestData) string {
	s.t = t
	a := args{t, d}
	switch d.Cmd {
	case "new":
		return s.begin(a)
	case "wait":
		s.now = s.now.Add(a.duration("for"))
		var out string
		for _, side := range []string{"P", "D", "B"} {
			if c := s.cores[side]; c != nil {
				out += s.step(side, Tick{})
			}
		}
		return out
	}
	c := s.cores[d.Cmd]
	if c == nil || len(d.CmdArgs) == 0 {
		t.Fatalf("%s: unknown command %q", d.Pos, d.Cmd)
	}
	switch d.CmdArgs[0].Key {
	case "stats":
		return fmt.Sprintf("%+v\n", c.Stats())
	case "status":
		st := c.Status()
		return fmt.Sprintf("ready=%v %s; %s; %d requests, engines %v\n", st.Ready, st.Reason, st.Phase, st.Requests, st.Engines)
	case "deadline":
		if at, ok := c.Deadline(); ok {
			return fmt.Sprintf("in %v\n", at.Sub(s.now))
		}
		return "none\n"
	}
	out := s.step(d.Cmd, s.event(d.Cmd, d.CmdArgs[0].Key, a))
	if out == "" {
		return "nothing\n"
	}
	return out
}

// begin makes the cores: "new [groups=1] [lease=60s] [requests=0] [held=0]".
func (s *script) begin(a args) string {
	for side := range roles {
		cfg := Config{
			Incarnation: uint64(len(side)) + 6, Lease: a.duration("lease"), Requests: a.int("requests", 0), HeldTokens: a.int("held", 0),
		}
		if side == "P" {
			cfg.Address = "p:1"
		}
		for g := range a.int("groups", 1) {
			cfg.Engines = append(cfg.Engines, strings.ToLower(side)+strconv.Itoa(g))
		}
		core, err := New(cfg)
		if err != nil {
			s.t.Fatal(err)
		}
		s.cores[side] = core
	}
	return ""
}

func (s *script) event(side, name string, a args) Event {
	id := uint64(a.int("id", 0))
	engine := a.text("engine", strings.ToLower(side)+"0")
	said := func(m wire.Message) Event { return EngineSaid{engine, m} }
	link, address := uint64(a.int("link", 1)), a.text("address", "p:1")
	switch name {
	case "register":
		return said(s.registration(side, engine, a))
	case "submit":
		return Submit{id, s.job(a)}
	case "cancel":
		return Cancel{id}
	case "discard":
		return Discard{id}
	case "renew":
		return Renew{id}
	case "release":
		m := s.claim(id, a)
		state := s.state(uint64(a.int("of", 0)))
		state.Incarnation, state.Request, state.Export.Capability = m.Incarnation, m.Request, m.Capability
		return Release{state, m.State}
	case "drain":
		return Drain{}
	case "reply":
		r := wire.Result{ID: id, Start: a.int("start", 0), Tokens: a.tokens("tokens"), Finish: a.text("finish", ""), CachedTokens: a.int("cached", 0)}
		if h := a.int("export", 0); h != 0 {
			r.Export = &wire.Export{Handoff: uint64(h), Capability: []byte("secret"), Blocks: wire.Tokens{7, 8, 9}, Tokens: a.int("prompt", 10)}
		}
		return said(&wire.EngineReply{Results: []wire.Result{r}})
	case "error":
		return said(&wire.RequestError{ID: id, Code: a.text("code", wire.CodeUnavailable), Field: a.text("field", ""), Message: "broken", Retryable: a.has("retryable"), Reader: uint64(a.int("reader", 0)), SourceSafe: a.has("safe")})
	case "aborted":
		return said(&wire.RequestAborted{ID: id, SourceSafe: !a.has("unsafe")})
	case "ready":
		return said(&wire.KVTransferReady{ID: id, CachedBlocks: a.int("cached", 0), Blocks: wire.Tokens{4, 5}, Tag: []byte("tag")})
	case "read-done":
		return said(&wire.KVReadDone{ID: id})
	case "leaves":
		return said(&wire.Disconnect{})
	case "says":
		return said(&wire.Pause{})
	case "gone":
		return EngineGone{engine}
	case "reader-claims":
		return ReaderSaid{link, s.claim(id, a)}
	case "reader-renews":
		return ReaderSaid{link, &wire.RenewKV{ID: id}}
	case "reader-sends":
		return ReaderSaid{link, &wire.SendKV{ID: id, CachedBlocks: 1, Blocks: wire.Tokens{4, 5}, Tag: []byte("tag")}}
	case "reader-done":
		return ReaderSaid{link, &wire.KVReadDone{ID: id}}
	case "reader-gives-up":
		return ReaderSaid{link, &wire.AbortRequest{ID: id}}
	case "reader-says":
		return ReaderSaid{link, &wire.Shutdown{}}
	case "reader-gone":
		return ReaderGone{link}
	case "source-grants":
		return SourceSaid{address, &wire.ClaimAck{ID: id, Lease: a.duration("lease")}}
	case "source-refuses":
		return SourceSaid{address, &wire.RequestError{ID: id, Code: a.text("code", wire.CodeGone), Message: "not held"}}
	case "source-says":
		return SourceSaid{address, &wire.Shutdown{}}
	case "source-gone":
		return SourceGone{address, errors.New("refused")}
	}
	s.t.Fatalf("unknown event %q", name)
	return nil
}

func (s *script) registration(side, engine string, a args) *wire.RegisterRole {
	return &wire.RegisterRole{
		Role: roles[side], Name: engine, Model: "tiny", Transport: a.text("transport", "tcp"), Requests: 4, Blocks: 32,
		Geometry:      wire.Geometry{Model: a.text("model", "f00d"), BlockSize: a.int("block", 4), Layers: 2, KVHeads: 8, HeadDim: 64, Planes: 2, KVDType: "bf16", VocabSize: 100, MaxSeqLen: 64},
		WeightVersion: uint64(a.int("version", 1)), Logprobs: a.text("logprobs", "raw"), Ranks: []wire.RankInfo{{Transport: []byte(engine)}},
	}
}

// job is "kind=whole prompt=10 [text=0] [max=5] [session=] [salt=] [group=-1]", and for a generation leg "first=51",
// "of=1", the job whose state it takes over, and [once]. Prompts of one text share a prefix.
func (s *script) job(a args) Job {
	job := Job{Group: a.int("group", -1), Request: &wire.SubmitRequest{Session: a.text("session", ""), Salt: a.text("salt", "")}}
	job.Kind = map[string]Kind{"whole": Whole, "context": Context, "generation": Generation}[a.text("kind", "whole")]
	job.Request.Sampling.MaxTokens = a.int("max", 5)
	job.Request.Sampling.PromptLogprobs = a.has("prompt-logprobs")
	job.Once = a.has("once")
	for i := range a.int("prompt", 10) {
		job.Request.Prompt = append(job.Request.Prompt, int32(a.int("text", 0)*1000+i))
	}
	if job.Kind == Generation {
		job.First = wire.Result{Tokens: a.tokens("first"), CachedTokens: a.int("cached", 0)}
		if raw := s.states[uint64(a.int("of", 0))]; raw != nil {
			job.State, job.Digest = s.state(uint64(a.int("of", 0))), sha256.Sum256(raw)
			job.State.Address = a.text("at", job.State.Address)
			job.State.Format = uint32(a.int("format", int(job.State.Format)))
		}
	}
	return job
}

func (s *script) state(id uint64) *wire.KVState {
	m, err := wire.Decode(s.states[id])
	if err != nil {
		s.t.Fatal(err)
	}
	return m.(*wire.KVState)
}

// claim is what D's core asks for, unless something of it is wrong.
func (s *script) claim(id uint64, a args) *wire.ClaimKV {
	of := uint64(a.int("of", 0))
	state := s.state(of)
	m := &wire.ClaimKV{
		ID: id, Incarnation: state.Incarnation, Request: state.Request, Capability: state.Export.Capability, State: sha256.Sum256(s.states[of]),
	}
	switch a.text("wrong", "") {
	case "incarnation":
		m.Incarnation++
	case "request":
		m.Request++
	case "capability":
		m.Capability = []byte("guess!")
	case "state":
		m.State[0]++
	}
	return m
}

func (s *script) step(side string, event Event) string {
	var b strings.Builder
	for _, action := range s.cores[side].Step(s.now, event) {
		b.WriteString(s.describe(action) + "\n")
	}
	return b.String()
}

func (s *script) describe(action Action) string {
	switch a := action.(type) {
	case Tell:
		return fmt.Sprintf("%s <- %s", a.Engine, message(a.Message))
	case Answer:
		return fmt.Sprintf("link %d <- %s", a.Link, message(a.Message))
	case Ask:
		return fmt.Sprintf("%s <- %s", a.Address, message(a.Message))
	case HangUp:
		return "hang up " + a.Address
	case Deliver:
		out := fmt.Sprintf("client %d <- %v from %d", a.ID, a.Result.Tokens, a.Result.Start)
		if a.Result.PromptTokens > 0 {
			out += fmt.Sprintf(", %d of %d prompt tokens cached", a.Result.CachedTokens, a.Result.PromptTokens)
		}
		if a.State != nil {
			s.states[a.ID] = a.State
			out += ", with a state"
		}
		if a.End {
			out += fmt.Sprintf(", %s, group %d", a.Result.Finish, a.Group)
		}
		return out
	case Fail:
		return fmt.Sprintf("client %d <- %s [%s] retryable=%v: %s", a.ID, a.Error.Code, a.Error.Field, a.Error.Retryable, a.Error.Message)
	case Close:
		return "close " + a.Engine
	case Warn:
		return "warn: " + a.Text
	}
	return fmt.Sprintf("%T", action)
}

func message(m wire.Message) string {
	switch m := m.(type) {
	case *wire.SubmitRequest:
		return fmt.Sprintf("SubmitRequest %d: %d prompt tokens, handoff=%v", m.ID, len(m.Prompt), m.Handoff)
	case *wire.SubmitRequestWithKV:
		return fmt.Sprintf("SubmitRequestWithKV %d: %d prompt tokens, generated %v, from %s handoff %d blocks %v", m.ID, len(m.Prompt), m.Generated, m.Source.Engine, m.Source.Export.Handoff, m.Source.Export.Blocks)
	case *wire.SendKV:
		return fmt.Sprintf("SendKV %d: handoff %d, %d cached, to blocks %v, %d ranks, reader %d", m.ID, m.Handoff, m.CachedBlocks, m.Blocks, len(m.Ranks), m.Reader)
	case *wire.ClaimKV:
		return fmt.Sprintf("ClaimKV %d: request %d of incarnation %d", m.ID, m.Request, m.Incarnation)
	case *wire.ClaimAck:
		return fmt.Sprintf("ClaimAck %d: %v", m.ID, m.Lease)
	case *wire.RequestError:
		return fmt.Sprintf("RequestError %d: %s, %s", m.ID, m.Code, m.Message)
	case *wire.RenewKV:
		return fmt.Sprintf("RenewKV %d: handoff %d", m.ID, m.Handoff)
	case *wire.ReleaseKV:
		return fmt.Sprintf("ReleaseKV %d: handoff %d", m.ID, m.Handoff)
	case *wire.KVReadDone:
		return fmt.Sprintf("KVReadDone %d", m.ID)
	case *wire.AbortRequest:
		return fmt.Sprintf("AbortRequest %d", m.ID)
	case *wire.RegisterRoleAck:
		return "RegisterRoleAck " + m.Error
	}
	return m.Header().String()
}

// args reads the arguments of a command.
type args struct {
	t *testing.T
	d *datadriven.TestData
}

func (a args) has(key string) bool { return a.d.HasArg(key) }

func (a args) text(key, otherwise string) string {
	if a.has(key) {
		a.d.ScanArgs(a.t, key, &otherwise)
	}
	return otherwise
}

func (a args) int(key string, otherwise int) int {
	if a.has(key) {
		a.d.ScanArgs(a.t, key, &otherwise)
	}
	return otherwise
}

func (a args) tokens(key string) (out wire.Tokens) {
	for _, arg := range a.d.CmdArgs {
		for _, v := range arg.Vals {
			if arg.Key == key {
				n, err := strconv.Atoi(v)
				if err != nil {
					a.t.Fatal(err)
				}
				out = append(out, int32(n))
			}
		}
	}
	return out
}

func (a args) duration(key string) time.Duration {
	if !a.has(key) {
		return 0
	}
	d, err := time.ParseDuration(a.text(key, ""))
	if err != nil {
		a.t.Fatal(err)
	}
	return d
}
