package loadgen

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"math"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"testing/iotest"
)

// readEvents reads all data of a stream.
func readEvents(r io.Reader) (list []string, err error) {
	const limit = 16 << 20
	s := newSSE()
	s.reset(r, limit)
	for {
		data, err := s.next()
		if err != nil {
			return list, err
		}
		list = append(list, string(data))
	}
}

func TestEventsAreRead(t *testing.T) {
	long := strings.Repeat("0123456789abcdef", 8<<10) // four times the buffer
	for _, tc := range []struct {
		in   string
		want []string
	}{
		{"", nil},
		{"data: a\n\ndata: b\n\n", []string{"a", "b"}},
		{"data:a\r\n\r\ndata:  b\r\n\r\n", []string{"a", " b"}},
		{"data: a\ndata: b\n\ndata: c\n\n", []string{"a\nb", "c"}},
		{": keep-alive\n\nevent: x\nid: 1\ndata: a\nretry: 3\n\n\n\ndata: b\n\n", []string{"a", "b"}},
		{"data: a\n: comment\ndata: b\n\n", []string{"a\nb"}},
		{"data: a\n\ndata: unfinished\n", []string{"a"}},
		{"data: a\n\ndata: unfinished", []string{"a"}},
		{"data: " + long + "\n\ndata: b\n\n", []string{long, "b"}},
		{"data: " + long + "\ndata: " + long + "\n\n", []string{long + "\n" + long}},
	} {
		for name, r := range map[string]io.Reader{
			"whole": strings.NewReader(tc.in), "bytes": iotest.OneByteReader(strings.NewReader(tc.in)),
			"halves": iotest.HalfReader(strings.NewReader(tc.in)), "with its end": iotest.DataErrReader(strings.NewReader(tc.in)),
		} {
			if got, err := readEvents(r); err != io.EOF || !reflect.DeepEqual(got, tc.want) {
				t.Errorf("%.60q in %s: %.100q, %v", tc.in, name, got, err)
			}
		}
	}
}

func TestEventsHaveBounds(t *testing.T) {
	endless := func(s string) io.Reader { return io.LimitReader(&repeat{s: []byte(s)}, 32<<20) }
	for what, tc := range map[string]struct {
		r    io.Reader
		want error
	}{
		"a line without an end":     {io.MultiReader(strings.NewReader("data: "), endless("x")), errEventTooLong},
		"an event without an end":   {endless("data: " + strings.Repeat("x", 1000) + "\n"), errEventTooLong},
		"a stream without an event": {endless(": " + strings.Repeat("x", 30000) + "\n"), errStreamTooLong},
	} {
		if list, err := readEvents(tc.r); !errors.Is(err, tc.want) || len(list) != 0 {
			t.Errorf("%s: %d events, %v", what, len(list), err)
		}
	}
}

// repeat reads s over and over.
type repeat struct {
	s []byte
	i int
}

func (r *repeat) Read(b []byte) (n int, err error) {
	for n < len(b) {
		k := copy(b[n:], r.s[r.i:])
		n, r.i = n+k, (r.i+k)%len(r.s)
	}
	return n, nil
}

func FuzzEvents(f *testing.F) {
	f.Add("data: a\ndata:b\r\n\r\n: c\n\ndata", uint64(1))
	f.Fuzz(func(t *testing.T, in string, seed uint64) {
		whole, err := readEvents(strings.NewReader(in))
		if err != io.EOF {
			t.Fatal(err)
		}
		rng := rand.New(rand.NewPCG(seed, 0))
		pieces, err := readEvents(&ragged{in, rng})
		if err != io.EOF || !reflect.DeepEqual(whole, pieces) {
			t.Fatalf("%q: %q, in pieces %q, %v", in, whole, pieces, err)
		}
		// The same by the book.
		var want []string
		var data []string
		for in != "" {
			line, rest, ok := strings.Cut(in, "\n")
			if !ok {
				break
			}
			in = rest
			line = strings.TrimSuffix(line, "\r")
			if value, ok := strings.CutPrefix(line, "data:"); ok {
				data = append(data, strings.TrimPrefix(value, " "))
			} else if line == "" && data != nil {
				want, data = append(want, strings.Join(data, "\n")), nil
			}
		}
		if !reflect.DeepEqual(whole, want) {
			t.Fatalf("%q, want %q", whole, want)
		}
	})
}

// ragged reads a few bytes at a time.
type ragged struct {
	s   string
	rng *rand.Rand
}

func (r *ragged) Read(b []byte) (int, error) {
	if r.s == "" {
		return 0, io.EOF
	}
	n := copy(b, r.s[:1+r.rng.IntN(min(len(r.s), 8))])
	r.s = r.s[n:]
	return n, nil
}

func TestChunksAreRead(t *testing.T) {
	for _, tc := range []struct {
		in   string
		want event
		ids  []int32
		text string
	}{
		{`{"choices":[{"index":0,"text":"a\u00e9\n","logprobs":null,"finish_reason":null,"token_ids":[7,8]}]}`, event{tokens: 2, ids: true, text: true}, []int32{7, 8}, "aé\n"},
		{`{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}],"usage":null}`, event{}, nil, ""},
		{`{"choices":[{"delta":{"content":"x"},"finish_reason":"stop"}]}`, event{text: true, finish: "stop"}, nil, "x"},
		{`{"choices":[{"delta":{"reasoning_content":"hm"}}]}`, event{text: true}, nil, ""},
		{`{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}`, event{text: true}, nil, ""},
		{`{"choices":[{"text":"","token_ids":[5]}]}`, event{tokens: 1, ids: true}, []int32{5}, ""},
		{`{"choices":[{"text":"","token_ids":null}]}`, event{}, nil, ""},
		{`{"choices":[],"usage":{"prompt_tokens":9,"total_tokens":12,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":4}}}`, event{usage: &usage{9, 3, 4}}, nil, ""},
		{`{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3,"prompt_tokens_details":null}}`, event{usage: &usage{9, 3, -1}}, nil, ""},
		{`{"error":{"message":"lost","type":"t","code":null}}`, event{fault: &RequestError{Kind: KindStream, Message: "lost"}}, nil, ""},
		{`{"error":"lost"}`, event{fault: &RequestError{Kind: KindStream, Message: "lost"}}, nil, ""},
		{`{"error":null,"choices":"x","usage":3}`, event{}, nil, ""},
	} {
		p := &parser{keepIDs: true, keepText: true}
		got, err := p.parse([]byte(tc.in))
		if err != nil || !reflect.DeepEqual(got, tc.want) || !reflect.DeepEqual(p.ids, tc.ids) || string(p.text) != tc.text {
			t.Errorf("%s: %+v, ids %v, text %q, %v", tc.in, got, p.ids, p.text, err)
		}
	}
	for _, in := range []string{
		"", "null", "[]", `{"choices":[{]}`, `{"choices":[{"token_ids":[-1]}]}`, `{"choices":[{"token_ids":[1.5]}]}`, `{"choices":[{"token_ids":[{}]}]}`,
		`{"usage":{"completion_tokens":-1}}`, `{"usage":{"completion_tokens":1e99}}`, `{"usage":{"prompt_tokens":"3"}}`, `{"choices":[`,
		`{"choices":` + strings.Repeat("[", 20000),
	} {
		if got, err := (&parser{keepIDs: true}).parse([]byte(in)); err == nil {
			t.Errorf("%.60s: %+v", in, got)
		}
	}
}

func FuzzChunks(f *testing.F) {
	f.Add([]byte(`{"choices":[{"text":"a","token_ids":[1,2],"finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":2}}`))
	f.Add([]byte(`{"choices":[{"delta":{"content":"\ud83d\ude00"}}],"error":{"message":"x"}}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		p := &parser{keepIDs: true, keepText: true}
		e, err := p.parse(bytes.Clone(in))
		if err != nil {
			return
		}
		if e.tokens != len(p.ids) || e.tokens > len(in) || len(p.text) > 3*len(in) {
			t.Fatalf("%q: %+v, %d ids, %d bytes of text", in, e, len(p.ids), len(p.text))
		}
		if e.fault == nil && !json.Valid(in) && !json.Valid(bytes.ToValidUTF8(in, nil)) && json.Valid(bytes.TrimSpace(in)) {
			t.Fatalf("%q was read", in)
		}
	})
}

// What a streamed token costs here beside the network: reading the event and the chunk.
func BenchmarkChunk(b *testing.B) {
	chunk := `data: {"id":"cmpl-0123456789abcdef01234567","object":"text_completion","created":1790000000,"model":"smollm2-135m-instruct","choices":[` +
		`{"index":0,"text":" hello","logprobs":null,"finish_reason":null,"token_ids":[12345]}],"usage":null}` + "\n\n"
	x := &exchange{sse: newSSE(), parser: parser{keepIDs: true}, events: func(int) {}}
	stream := &repeat{s: []byte(chunk)}
	x.sse.reset(stream, math.MaxInt64)
	r := &Result{}
	b.ReportAllocs()
	b.SetBytes(int64(len(chunk)))
	last := x.sse.at
	for b.Loop() {
		data, err := x.sse.next()
		if err != nil {
			b.Fatal(err)
		}
		e, err := x.parser.parse(data)
		if err != nil {
			b.Fatal(err)
		}
		last = x.arrived(r, e, last)
		x.parser.ids, r.gaps = x.parser.ids[:0], r.gaps[:0]
	}
}
