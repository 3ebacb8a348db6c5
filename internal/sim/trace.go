package sim

import (
	"fmt"
	"strings"

	"baton/handoff"
	"baton/wire"
)

// told is a message as a trace shows it.
type told struct{ m wire.Message }

func (t told) String() string {
	switch m := t.m.(type) {
	case *wire.SubmitRequest:
		return fmt.Sprintf("SubmitRequest %d: request %d, %d prompt tokens, %d more, at most %d", m.ID, m.Sampling.Seed,
			len(m.Prompt), len(m.Resume), m.Sampling.MaxTokens)
	case *wire.SubmitRequestWithKV:
		return fmt.Sprintf("SubmitRequestWithKV %d: request %d, %d prompt tokens, %d more, from %s handoff %d blocks %v", m.ID,
			m.Sampling.Seed, len(m.Prompt), len(m.Generated), m.Source.Engine, m.Source.Export.Handoff, m.Source.Export.Blocks)
	case *wire.EngineReply:
		return "EngineReply" + results(m.Results)
	case *wire.EngineReplyPartial:
		return "EngineReplyPartial" + results(m.Results)
	case *wire.KVEvents:
		return fmt.Sprintf("KVEvents %d to %d, reset %t: %d", m.Sequence, m.Next, m.Reset, len(m.Events))
	case *wire.RegisterRole:
		return fmt.Sprintf("RegisterRole %s of %s, incarnation %d, weights %d", m.Role, m.Name, m.Incarnation, m.WeightVersion)
	}
	return fmt.Sprintf("%s %+v", t.m.Header(), t.m)
}

func results(list []wire.Result) string {
	var b strings.Builder
	for i := range list {
		r := &list[i]
		fmt.Fprintf(&b, " [%d: %d tokens from %d on", r.ID, len(r.Tokens), r.Start)
		if r.Finish != "" {
			fmt.Fprintf(&b, ", %s", r.Finish)
		}
		if r.Export != nil {
			fmt.Fprintf(&b, ", handoff %d of blocks %v", r.Export.Handoff, r.Export.Blocks)
		}
		b.WriteString("]")
	}
	return b.String()
}

// ordered is an order of a handoff as a trace shows it.
type ordered struct{ a handoff.Action }

func (o ordered) String() string {
	switch a := o.a.(type) {
	case handoff.OpenExport:
		return fmt.Sprintf("open export %d on rank %d: %v", a.Handoff, a.Rank, a.Ranges)
	case handoff.Revoke:
		return fmt.Sprintf("revoke export %d on rank %d", a.Handoff, a.Rank)
	case handoff.StartPull:
		return fmt.Sprintf("pull %d into rank %d, export %d: %v", a.Transfer, a.Rank, a.Handoff, a.Copies)
	case handoff.StartPush:
		return fmt.Sprintf("push %d from rank %d under %q: %v", a.Transfer, a.Rank, a.Tag, a.Copies)
	case handoff.Expect:
		return fmt.Sprintf("expect %d into rank %d: %v", a.Transfer, a.Rank, a.Ranges)
	}
	return fmt.Sprintf("%T %+v", o.a, o.a)
}
