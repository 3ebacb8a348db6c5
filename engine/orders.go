package engine

import (
	"encoding/binary"
	"errors"
	"fmt"

	"baton/compute"
	"baton/handoff"
	"baton/layout"
	"baton/model"
	"baton/wire"
)

// The kinds of orders and events that go to and come from ranks in other processes.
const (
	kindSeal   = "seal"   // answered by the same kind, as all of these are
	kindVerify = "verify" //
	kindExport = "export"
	kindRevoke = "revoke"
	kindExpect = "expect"
	kindPull   = "pull" // answered by a KVHandoffComplete, as is kindPush
	kindPush   = "push"
	kindCancel = "cancel" // not answered
	kindLook   = "look"   // answered by a KVHandoffComplete, if the transfer has become safe
)

// encodeOrder writes an order for a rank in another process.
func encodeOrder(engine, rank int, order handoff.Action) *wire.RankOrder {
	m := &wire.RankOrder{Engine: engine, Rank: rank}
	switch a := order.(type) {
	case handoff.Seal:
		m.Kind, m.Handoff, m.Blocks = kindSeal, a.Handoff, a.Blocks
	case handoff.Verify:
		m.Kind, m.Transfer, m.Blocks = kindVerify, a.Transfer, a.Blocks
	case handoff.OpenExport:
		m.Kind, m.Handoff, m.Secret, m.Extents = kindExport, a.Handoff, a.Capability, encodeRanges(a.Ranges)
	case handoff.Revoke:
		m.Kind, m.Handoff = kindRevoke, a.Handoff
	case handoff.StartPull:
		m.Kind, m.Transfer, m.Peer, m.Handoff, m.Secret, m.Extents = kindPull, a.Transfer, a.Peer, a.Handoff, a.Capability, encodeCopies(a.Copies)
	case handoff.StartPush:
		m.Kind, m.Transfer, m.Peer, m.Secret, m.Extents = kindPush, a.Transfer, a.Peer, a.Tag, encodeCopies(a.Copies)
	case handoff.Expect:
		m.Kind, m.Transfer, m.Extents = kindExpect, a.Transfer, encodeRanges(a.Ranges)
	case handoff.Cancel:
		m.Kind, m.Transfer = kindCancel, a.Transfer
	case handoff.Recheck:
		m.Kind, m.Transfer = kindLook, a.Transfer
	}
	return m
}

// decodeOrder reads what encodeOrder wrote.
func decodeOrder(m *wire.RankOrder) (handoff.Action, error) {
	switch m.Kind {
	case kindSeal:
		return handoff.Seal{Handoff: m.Handoff, Rank: m.Rank, Blocks: m.Blocks}, nil
	case kindVerify:
		return handoff.Verify{Transfer: m.Transfer, Rank: m.Rank, Blocks: m.Blocks}, nil
	case kindExport:
		return handoff.OpenExport{Handoff: m.Handoff, Rank: m.Rank, Capability: m.Secret, Ranges: decodeRanges(m.Extents)}, nil
	case kindRevoke:
		return handoff.Revoke{Handoff: m.Handoff, Rank: m.Rank}, nil
	case kindPull:
		return handoff.StartPull{Transfer: m.Transfer, Rank: m.Rank, Peer: m.Peer, Handoff: m.Handoff, Capability: m.Secret, Copies: decodeCopies(m.Extents)}, nil
	case kindPush:
		return handoff.StartPush{Transfer: m.Transfer, Rank: m.Rank, Peer: m.Peer, Tag: m.Secret, Copies: decodeCopies(m.Extents)}, nil
	case kindExpect:
		return handoff.Expect{Transfer: m.Transfer, Rank: m.Rank, Ranges: decodeRanges(m.Extents)}, nil
	case kindCancel:
		return handoff.Cancel{Transfer: m.Transfer}, nil
	case kindLook:
		return handoff.Recheck{Transfer: m.Transfer}, nil
	}
	return nil, fmt.Errorf("engine: an order of an unknown kind, %.20q: run the same release in all processes of a shard", m.Kind)
}

// encodeEvent writes what an order came to.
func encodeEvent(engine, rank int, event handoff.Event) wire.Message {
	m := &wire.RankEvent{Engine: engine, Rank: rank}
	switch e := event.(type) {
	case handoff.Settled:
		return &wire.KVHandoffComplete{ID: e.Transfer, Rank: rank, Engine: engine, Failed: e.Err != nil, SourceSafe: e.Safe, Bytes: e.Bytes, Error: words(e.Err)}
	case handoff.Sealed:
		m.Kind, m.Handoff = kindSeal, e.Handoff
	case handoff.Verified:
		m.Kind, m.Transfer, m.Error = kindVerify, e.Transfer, words(e.Err)
	case handoff.Opened:
		m.Kind, m.Handoff, m.Error = kindExport, e.Handoff, words(e.Err)
	case handoff.Revoked:
		m.Kind, m.Handoff, m.Quiesced = kindRevoke, e.Handoff, e.Quiesced
	case handoff.Expected:
		m.Kind, m.Transfer, m.Tag, m.Error = kindExpect, e.Transfer, e.Tag, words(e.Err)
	}
	return m
}

// decodeEvent reads what encodeEvent wrote; nil is none that an engine could use.
func decodeEvent(message wire.Message) handoff.Event {
	switch m := message.(type) {
	case *wire.KVHandoffComplete:
		e := handoff.Settled{Transfer: m.ID, Safe: m.SourceSafe, Bytes: m.Bytes}
		if m.Failed {
			e.Err = fmt.Errorf("rank %d: %w", m.Rank, said(m.Error, "it failed without a word"))
		}
		return e
	case *wire.RankEvent:
		switch m.Kind {
		case kindSeal:
			return handoff.Sealed{Handoff: m.Handoff, Rank: m.Rank}
		case kindVerify:
			return handoff.Verified{Transfer: m.Transfer, Err: said(m.Error, "")}
		case kindExport:
			return handoff.Opened{Handoff: m.Handoff, Rank: m.Rank, Err: said(m.Error, "")}
		case kindRevoke:
			return handoff.Revoked{Handoff: m.Handoff, Rank: m.Rank, Quiesced: m.Quiesced}
		case kindExpect:
			return handoff.Expected{Transfer: m.Transfer, Tag: m.Tag, Err: said(m.Error, "")}
		}
	}
	return nil
}

func words(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// said is an error in somebody's words; nil for none, unless there must be one.
func said(words, otherwise string) error {
	if words == "" {
		words = otherwise
	}
	if words == "" {
		return nil
	}
	return errors.New(words)
}

func encodeRanges(ranges []handoff.Range) []byte {
	b := make([]byte, 0, 16*len(ranges))
	for _, r := range ranges {
		b = binary.LittleEndian.AppendUint64(b, uint64(r.Off))
		b = binary.LittleEndian.AppendUint64(b, uint64(r.Len))
	}
	return b
}

func decodeRanges(b []byte) []handoff.Range {
	ranges := make([]handoff.Range, len(b)/16)
	for i := range ranges {
		ranges[i] = handoff.Range{Off: number(b, 2*i), Len: number(b, 2*i+1)}
	}
	return ranges
}

func encodeCopies(copies []layout.Copy) []byte {
	b := make([]byte, 0, 24*len(copies))
	for _, c := range copies {
		b = binary.LittleEndian.AppendUint64(b, uint64(c.Src))
		b = binary.LittleEndian.AppendUint64(b, uint64(c.Dst))
		b = binary.LittleEndian.AppendUint64(b, uint64(c.Len))
	}
	return b
}

func decodeCopies(b []byte) []layout.Copy {
	copies := make([]layout.Copy, len(b)/24)
	for i := range copies {
		copies[i] = layout.Copy{Src: number(b, 3*i), Dst: number(b, 3*i+1), Len: number(b, 3*i+2)}
	}
	return copies
}

// number is the i-th of a list of int64.
func number(b []byte, i int) int64 { return int64(binary.LittleEndian.Uint64(b[8*i:])) }

// encodeBatch writes a step plan.
func encodeBatch(sequence uint64, engine int, b *model.Batch) *wire.TPBroadcast {
	m := &wire.TPBroadcast{Sequence: sequence, Engine: engine, Tokens: b.Tokens, Positions: b.Positions, Slots: b.Slots, Logits: b.Logits}
	for _, s := range b.Sequences {
		m.Sequences = append(m.Sequences, int32(s.Row), int32(s.Rows), int32(s.Position), int32(len(s.Blocks)))
		m.Blocks = append(m.Blocks, s.Blocks...)
	}
	for _, n := range b.Lockstep {
		m.Lockstep = append(m.Lockstep, int32(n))
	}
	return m
}

// decodeBatch reads what encodeBatch wrote. The decoder and the backend check the numbers in it.
func decodeBatch(m *wire.TPBroadcast) (model.Batch, error) {
	b := model.Batch{Tokens: m.Tokens, Positions: m.Positions, Slots: m.Slots, Logits: m.Logits}
	blocks := m.Blocks
	for i := 0; i+4 <= len(m.Sequences); i += 4 {
		s := m.Sequences[i : i+4]
		if s[3] < 0 || int(s[3]) > len(blocks) {
			return b, fmt.Errorf("engine: step %d lists %d blocks where a sequence has %d", m.Sequence, len(blocks), s[3])
		}
		b.Sequences = append(b.Sequences, compute.Sequence{Row: int(s[0]), Rows: int(s[1]), Position: int(s[2]), Blocks: blocks[:s[3]]})
		blocks = blocks[s[3]:]
	}
	for _, n := range m.Lockstep {
		b.Lockstep = append(b.Lockstep, int(n))
	}
	return b, nil
}

// fingerprint is of a step plan, the same in every process.
func fingerprint(b *model.Batch) uint64 {
	m := encodeBatch(0, 0, b)
	raw, err := m.MarshalMsg(nil)
	if err != nil {
		return 0 // it cannot fail for lists of numbers
	}
	return sum(raw)
}
