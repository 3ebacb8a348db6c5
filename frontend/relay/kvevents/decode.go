package kvevents

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"

	"github.com/tinylib/msgp/msgp"
)

// Kind is what an Event tells.
type Kind uint8

// The kinds.
const (
	Stored  Kind = iota + 1 // blocks can be reused from now on
	Removed                 // blocks are gone
	Cleared                 // all blocks are gone
	Session                 // a session has had a job there
)

// Event is one change of what an engine's cache holds.
type Event struct {
	Kind Kind
	// Blocks are the engine's names of the blocks, in the order of their tokens: opaque bytes.
	Blocks []string
	// Parent is the block before the first of Blocks; "" when that is the first of a prompt.
	Parent string
	// Tokens are those of Blocks, BlockSize each.
	Tokens    []int32
	BlockSize int
	// Digests says that Blocks and Parent are kvcache's digests of all tokens up to there; Tokens are not told then.
	Digests bool
	// At is when a session had its job, in Unix milliseconds. Blocks has the SHA-256 of its name then.
	At int64
	// Foreign says that more than the tokens makes the blocks what they are: an adapter, or another storage tier.
	Foreign bool
}

var errShort = errors.New("kvevents: the batch is not as expected")

// DecodeBatch reads a batch as vLLM publishes it: msgpack, [time, [events], ...] or a map of the same. Events come as
// arrays that begin with their name, or as maps with "type". What is not known is skipped.
func DecodeBatch(b []byte) ([]Event, error) {
	d := decoder{b: b}
	var events []Event
	err := d.record(func(key string, at int) error {
		if key != "events" && at != 1 {
			return d.skip()
		}
		n, err := d.array()
		if err != nil {
			return err
		}
		for range n {
			e, err := d.event()
			if err != nil {
				return err
			}
			if e.Kind != 0 {
				events = append(events, e)
			}
		}
		return nil
	})
	return events, err
}

// decoder walks over msgpack.
type decoder struct{ b []byte }

func (d *decoder) skip() (err error) {
	d.b, err = msgp.Skip(d.b)
	return err
}

// array is the length of an array. Each element takes a byte at least.
func (d *decoder) array() (int, error) {
	n, rest, err := msgp.ReadArrayHeaderBytes(d.b)
	if err != nil {
		return 0, err
	}
	if int64(n) > int64(len(rest)) {
		return 0, errShort
	}
	d.b = rest
	return int(n), nil
}

// record walks over an array's elements, by position, or a map's, by key. Of a map at is -1.
func (d *decoder) record(each func(key string, at int) error) error {
	if msgp.NextType(d.b) != msgp.MapType {
		n, err := d.array()
		if err != nil {
			return err
		}
		for i := range n {
			if err := each("", i); err != nil {
				return err
			}
		}
		return nil
	}
	n, rest, err := msgp.ReadMapHeaderBytes(d.b)
	if err != nil {
		return err
	}
	if int64(n) > int64(len(rest)) {
		return errShort
	}
	d.b = rest
	for range n {
		key, rest, err := msgp.ReadStringBytes(d.b)
		if err != nil {
			return err
		}
		d.b = rest
		if err := each(key, -1); err != nil {
			return err
		}
	}
	return nil
}

// fields of events by their position in an array, by type.
var fields = map[string][]string{
	"BlockStored":      {"type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"},
	"BlockRemoved":     {"type", "block_hashes", "medium"},
	"AllBlocksCleared": {"type"},
}

func (d *decoder) event() (e Event, err error) {
	kind := ""
	err = d.record(func(key string, at int) (err error) {
		if at == 0 {
			key = "type"
		} else if list := fields[kind]; at > 0 && at < len(list) {
			key = list[at]
		}
		return d.field(&e, &kind, key)
	})
	if err != nil {
		return e, err
	}
	switch kind {
	case "BlockStored":
		e.Kind = Stored
		if e.BlockSize < 1 || len(e.Tokens) != e.BlockSize*len(e.Blocks) {
			return e, fmt.Errorf("kvevents: %d tokens for %d blocks of %d", len(e.Tokens), len(e.Blocks), e.BlockSize)
		}
	case "BlockRemoved":
		e.Kind = Removed
	case "AllBlocksCleared":
		e.Kind = Cleared
	}
	return e, nil
}

func (d *decoder) field(e *Event, kind *string, key string) (err error) {
	switch key {
	case "type":
		*kind, d.b, err = msgp.ReadStringBytes(d.b)
	case "block_hashes":
		n, err := d.array()
		if err != nil {
			return err
		}
		for range n {
			h, err := d.hash()
			if err != nil {
				return err
			}
			e.Blocks = append(e.Blocks, h)
		}
	case "parent_block_hash":
		e.Parent, err = d.hash()
	case "token_ids":
		return d.tokens(e)
	case "block_size":
		e.BlockSize, d.b, err = msgp.ReadIntBytes(d.b)
		if e.BlockSize > 1<<20 {
			return errShort
		}
	case "lora_id", "lora_name":
		e.Foreign = e.Foreign || !msgp.IsNil(d.b)
		return d.skip()
	case "medium":
		if msgp.NextType(d.b) == msgp.StrType {
			var medium string
			medium, d.b, err = msgp.ReadStringBytes(d.b)
			e.Foreign = e.Foreign || medium != "GPU"
			return err
		}
		return d.skip()
	default:
		return d.skip()
	}
	return err
}

// hash is a block's name: an integer or bytes. Names of both kinds differ in their first byte.
func (d *decoder) hash() (string, error) {
	before := d.b
	switch msgp.NextType(d.b) {
	case msgp.NilType:
		return "", d.skip()
	case msgp.IntType, msgp.UintType, msgp.BinType, msgp.StrType:
		if err := d.skip(); err != nil {
			return "", err
		}
		if n := len(before) - len(d.b); n <= maxName {
			return string(before[:n]), nil
		}
	}
	return "", errShort
}

// maxName bounds the name of a block, in bytes.
const maxName = 256

func (d *decoder) tokens(e *Event) error {
	n, err := d.array()
	if err != nil {
		return err
	}
	e.Tokens = make([]int32, n)
	for i := range e.Tokens {
		id, rest, err := msgp.ReadInt64Bytes(d.b)
		if err != nil {
			return err
		}
		if id < math.MinInt32 || id > math.MaxInt32 {
			return errShort
		}
		e.Tokens[i], d.b = int32(id), rest
	}
	return nil
}

// decodeTRT reads TensorRT-LLM's events. next is the number that the next event will have, 0 when there is none to go
// by; gap says that some are missing before the first.
func decodeTRT(b []byte, next int64) (events []Event, after int64, gap bool, err error) {
	var list []struct {
		ID   int64 `json:"event_id"`
		Data struct {
			Type   string          `json:"type"`
			Parent json.RawMessage `json:"parent_hash"`
			Hashes []json.Number   `json:"block_hashes"`
			Blocks []struct {
				Hash   json.Number     `json:"block_hash"`
				LoRA   json.RawMessage `json:"lora_id"`
				Level  int             `json:"cache_level"`
				Tokens []struct {
					ID    int32 `json:"token_id"`
					Extra int64 `json:"token_extra_id"`
				} `json:"tokens"`
			} `json:"blocks"`
		} `json:"data"`
	}
	if err := json.Unmarshal(b, &list); err != nil {
		return nil, next, false, fmt.Errorf("kvevents: %w", err)
	}
	for i, one := range list {
		gap = gap || next != 0 && one.ID != next
		if i > 0 && one.ID != list[i-1].ID+1 {
			gap = true
		}
		next = one.ID + 1
		switch one.Data.Type {
		case "stored":
			e := Event{Kind: Stored}
			if p := string(one.Data.Parent); p != "" && p != "null" {
				e.Parent = p
			}
			for _, block := range one.Data.Blocks {
				e.BlockSize = max(e.BlockSize, len(block.Tokens))
				e.Foreign = e.Foreign || len(block.LoRA) > 0 && string(block.LoRA) != "null"
				e.Blocks = append(e.Blocks, block.Hash.String())
				for _, t := range block.Tokens {
					e.Foreign = e.Foreign || t.Extra != 0
					e.Tokens = append(e.Tokens, t.ID)
				}
			}
			if e.BlockSize > 0 && len(e.Tokens) == e.BlockSize*len(e.Blocks) { // otherwise the last is not complete
				events = append(events, e)
			}
		case "removed":
			e := Event{Kind: Removed}
			for _, h := range one.Data.Hashes {
				e.Blocks = append(e.Blocks, h.String())
			}
			events = append(events, e)
		case "created":
			events = append(events, Event{Kind: Cleared})
		}
	}
	return events, next, gap, nil
}
