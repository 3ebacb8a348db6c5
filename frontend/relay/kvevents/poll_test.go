package kvevents

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"
)

func digestOf(n byte) string { return strings.Repeat(string([]byte{n}), 32) }

func b64(n byte) string { return `"` + base64.StdEncoding.EncodeToString([]byte(digestOf(n))) + `"` }

// An engine of ours tells digests, by a cursor; the first answer is a beginning, a later one that resets a gap.
func TestPoll(t *testing.T) {
	var p Poll
	decode := func(text string, gap bool, query string, waits, whole bool, want ...Event) {
		t.Helper()
		events, g, err := p.Decode([]byte(text))
		if err != nil || g != gap || !reflect.DeepEqual(events, want) {
			t.Errorf("%+v, gap %v, %v; want %+v", events, g, err, want)
		}
		if p.Query() != query || p.Waits() != waits || p.Whole() != whole {
			t.Errorf("%s, waits %v, whole %v", p.Query(), p.Waits(), p.Whole())
		}
	}
	if p.Query() != "" || p.Waits() {
		t.Errorf("%q", p.Query())
	}
	stored := Event{Kind: Stored, Digests: true, BlockSize: 16, Blocks: []string{digestOf(1), digestOf(2)}}
	decode(` {"engine":"baton","cursor":"a.1.2","reset":true,"more":true,"block_size":16,"events":[{"type":"stored","blocks":[`+b64(1)+`,`+b64(2)+`]}]}`,
		false, "?cursor=a.1.2", true, false, stored)
	stored.Parent, stored.Blocks = digestOf(2), []string{digestOf(3)}
	decode(`{"cursor":"a.2.2","block_size":16,"events":[{"type":"stored","parent":`+b64(2)+`,"blocks":[`+b64(3)+`]},{"type":"new"},{"type":"removed","blocks":[`+b64(1)+`]}]}`,
		false, "?cursor=a.2.2&wait=10", true, true, stored, Event{Kind: Removed, Digests: true, BlockSize: 16, Blocks: []string{digestOf(1)}})
	decode(`{"cursor":"a.3.3","block_size":16,"events":[{"type":"session","session":`+b64(7)+`,"at":1234}]}`, false, "?cursor=a.3.3&wait=10", true, true,
		Event{Kind: Session, Digests: true, Blocks: []string{digestOf(7)}, At: 1234})
	decode(`{"cursor":"b.1.1","reset":true,"block_size":0,"events":[]}`, true, "?cursor=b.1.1&wait=10", true, true)
	for _, bad := range []string{
		`{`, `{}`, `{"cursor":"` + strings.Repeat("x", 300) + `"}`, `{"cursor":"b.1.1","more":true}`,
		`{"cursor":"c","block_size":16,"events":[{"type":"stored","blocks":["AAAA"]}]}`, `{"cursor":"c","block_size":16,"events":[{"type":"stored","parent":"AAAA","blocks":[]}]}`,
		`{"cursor":"c","events":[{"type":"session"}]}`, `{"cursor":"c","block_size":0,"events":[{"type":"stored","blocks":[` + b64(1) + `]}]}`,
	} {
		if events, _, err := p.Decode([]byte(bad)); err == nil {
			t.Errorf("%s: %+v", bad, events)
		}
	}
	if p.Query() != "?cursor=b.1.1&wait=10" {
		t.Errorf("an answer that is none moved the cursor: %s", p.Query())
	}
	// TensorRT-LLM's are arrays.
	p = Poll{}
	if events, gap, err := p.Decode([]byte(`[{"event_id":7,"data":{"type":"removed","block_hashes":[9]}}]`)); err != nil || gap || len(events) != 1 || p.Waits() || p.Query() != "" || !p.Whole() {
		t.Errorf("%+v, %v, %v", events, gap, err)
	}
	if _, gap, err := p.Decode([]byte(`[{"event_id":9,"data":{"type":"x"}}]`)); err != nil || !gap {
		t.Errorf("a gap: %v, %v", gap, err)
	}
}

// Whatever an engine answers, events are as their users expect them.
func FuzzPoll(f *testing.F) {
	f.Add([]byte(`{"cursor":"a.1.2","reset":true,"more":true,"block_size":16,"events":[{"type":"stored","blocks":[` + b64(1) + `]}]}`))
	f.Add([]byte(`[{"event_id":5,"data":{"type":"stored","parent_hash":null,"blocks":[{"block_hash":1,"tokens":[{"token_id":1}]}]}}]`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var p Poll
		events, _, err := p.Decode(b)
		if err != nil {
			return
		}
		for _, e := range events {
			switch {
			case e.Kind < Stored || e.Kind > Session:
				t.Fatal(e.Kind)
			case e.Kind == Stored && e.BlockSize < 1:
				t.Fatal(e.BlockSize)
			case e.Kind == Stored && !e.Digests && len(e.Tokens) != e.BlockSize*len(e.Blocks):
				t.Fatal(fmt.Sprint(e))
			}
			if e.Digests {
				for _, d := range e.Blocks {
					if len(d) != 32 {
						t.Fatal(len(d))
					}
				}
			}
		}
		if _, err := json.Marshal(p.Query()); err != nil {
			t.Fatal(err)
		}
	})
}
