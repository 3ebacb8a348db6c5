package kvevents

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"time"
)

// Poll is how far an engine's events have been read over HTTP, by POST /kv_cache_events. TensorRT-LLM's engines forget
// what they have told, so they can tell one reader only; ours answer when there is news, and begin anew for those who have
// missed something. The zero value knows nothing of the engine.
type Poll struct {
	next   int64  // number of TensorRT-LLM's next event, 0 when there is none to go by
	cursor string // of ours, "" before the first answer
	more   bool   // ours has more to tell
}

// PollWait is how long an engine of ours may wait for news before it answers.
const PollWait = 10 * time.Second

// Query is the URL's query, with the ?, for the next answer.
func (p *Poll) Query() string {
	if p.cursor == "" {
		return ""
	}
	q := url.Values{"cursor": {p.cursor}}
	if !p.more {
		q.Set("wait", strconv.Itoa(int(PollWait.Seconds())))
	}
	return "?" + q.Encode()
}

// Waits reports whether the engine itself waits for news, so that it can be asked again at once.
func (p *Poll) Waits() bool { return p.cursor != "" }

// Whole reports whether all that there was at the last answer has been told.
func (p *Poll) Whole() bool { return !p.more }

// Decode reads an answer. gap says that what is known of the engine does not hold any more: forget it first.
func (p *Poll) Decode(b []byte) (events []Event, gap bool, err error) {
	if bytes.HasPrefix(bytes.TrimLeft(b, " \t\r\n"), []byte{'{'}) {
		return p.decodeOurs(b)
	}
	events, p.next, gap, err = decodeTRT(b, p.next)
	return events, gap, err
}

// maxCursor bounds a cursor.
const maxCursor = 256

func (p *Poll) decodeOurs(b []byte) (events []Event, gap bool, err error) {
	var a struct {
		Cursor    string `json:"cursor"`
		Reset     bool   `json:"reset"`
		More      bool   `json:"more"`
		BlockSize int    `json:"block_size"`
		Events    []struct {
			Type    string   `json:"type"`
			Parent  []byte   `json:"parent"`
			Blocks  [][]byte `json:"blocks"`
			Session []byte   `json:"session"`
			At      int64    `json:"at"`
		} `json:"events"`
	}
	if err := json.Unmarshal(b, &a); err != nil {
		return nil, false, fmt.Errorf("kvevents: %w", err)
	}
	if a.Cursor == "" || len(a.Cursor) > maxCursor {
		return nil, false, errors.New("kvevents: the answer has no cursor")
	}
	if a.More && a.Cursor == p.cursor {
		return nil, false, errors.New("kvevents: the answer has more, but the cursor stands still")
	}
	for _, one := range a.Events {
		e := Event{Digests: true, BlockSize: a.BlockSize, Parent: string(one.Parent)}
		switch one.Type {
		case "stored":
			e.Kind = Stored
		case "removed":
			e.Kind = Removed
		case "session":
			e.Kind, e.At, e.BlockSize, one.Blocks = Session, one.At, 0, [][]byte{one.Session}
		default:
			continue
		}
		if n := len(one.Parent); n != 0 && n != sha256.Size {
			return nil, false, fmt.Errorf("kvevents: a digest of %d bytes", n)
		}
		for _, d := range one.Blocks {
			if len(d) != sha256.Size {
				return nil, false, fmt.Errorf("kvevents: a digest of %d bytes", len(d))
			}
			e.Blocks = append(e.Blocks, string(d))
		}
		if e.Kind == Stored && (e.BlockSize < 1 || e.BlockSize > 1<<20) {
			return nil, false, fmt.Errorf("kvevents: blocks of %d tokens", e.BlockSize)
		}
		events = append(events, e)
	}
	gap = a.Reset && p.cursor != ""
	p.cursor, p.more = a.Cursor, a.More
	return events, gap, nil
}
