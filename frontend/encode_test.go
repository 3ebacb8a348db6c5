package frontend

import (
	"encoding/json"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"baton/wire"
)

// TestFloat32RoundTrip: whoever reads the number as f32 or as f64 rounded to f32 gets the same bits.
func TestFloat32RoundTrip(t *testing.T) {
	check := func(f float32) {
		b := appendFloat32(nil, f)
		if !json.Valid(b) {
			t.Fatalf("%v becomes %s", f, b)
		}
		d, err := strconv.ParseFloat(string(b), 64)
		if err != nil || math.Float32bits(float32(d)) != math.Float32bits(f) {
			t.Fatalf("%x becomes %s, which reads as %v (%v)", math.Float32bits(f), b, d, err)
		}
	}
	for _, f := range []float32{0, 1, -1, math.MaxFloat32, -math.MaxFloat32, math.SmallestNonzeroFloat32, 1e-6, 9.999999e-7, 1e21, 16777216, -0.1} {
		check(f)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for range 200_000 {
		if f := math.Float32frombits(rng.Uint32()); !math.IsNaN(float64(f)) && !math.IsInf(float64(f), 0) {
			check(f)
		}
		check(-rng.Float32() * 20)
	}
	for _, f := range []float32{float32(math.Inf(-1)), float32(math.Inf(1)), float32(math.NaN())} {
		if got := string(appendFloat32(nil, f)); got != "-9999" {
			t.Errorf("%v becomes %s", f, got)
		}
	}
}

func TestCandidates(t *testing.T) {
	top := wire.TokenLogprobs{IDs: wire.Tokens{7, 3, 9}, Logprobs: wire.Floats{-1, -2, -3}}
	tests := []struct {
		id   int32
		k    int
		want []candidate
	}{
		{7, 0, []candidate{{7, -5, 1}}},
		{7, 2, []candidate{{7, -1, 1}, {3, -2, 2}}},
		{3, 2, []candidate{{7, -1, 1}, {3, -2, 2}}},
		{9, 2, []candidate{{7, -1, 1}, {3, -2, 2}, {9, -5, 3}}},
		{4, 3, []candidate{{7, -1, 1}, {3, -2, 2}, {9, -3, 3}, {4, -5, 0}}},
		{4, 9, []candidate{{7, -1, 1}, {3, -2, 2}, {9, -3, 3}, {4, -5, 0}}},
	}
	for _, tt := range tests {
		got := (&tokenLogprob{id: tt.id, logprob: -5, top: top}).candidates(nil, tt.k)
		if len(got) != len(tt.want) {
			t.Errorf("%d of %d: %v", tt.k, tt.id, got)
			continue
		}
		for i := range got {
			if got[i] != tt.want[i] {
				t.Errorf("%d of %d: %v, want %v", tt.k, tt.id, got, tt.want)
			}
		}
	}
}

func TestTokenIDs(t *testing.T) {
	for in, want := range map[string]string{
		`[]`: "[]", `[ ]`: "[]", `[1]`: "[1]", "[ 1 ,\n2\t]": "[1,2]", `[0,99]`: "[0,99]",
		`[100]`: "", `[-1]`: "", `[1.0]`: "", `[1e1]`: "", `["1"]`: "", `[null]`: "", `[[1]]`: "", `[true]`: "", `{}`: "", `5`: "",
		`[4294967297]`: "", `[99999999999999999999999]`: "",
	} {
		ids, err := value{path: "x", raw: []byte(in)}.tokenIDs(100)
		if got := string(appendIDs(nil, ids)); (err == nil) != (want != "") || err == nil && got != want {
			t.Errorf("%s: %s, %v", in, got, err)
		}
	}
	ids, err := value{path: "x", raw: []byte(`[2147483646]`)}.tokenIDs(0)
	if err != nil || ids[0] != 2147483646 {
		t.Errorf("without a vocabulary: %v, %v", ids, err)
	}
}

// BenchmarkChunk is what a stream's result of one token costs beside the socket.
func BenchmarkChunk(b *testing.B) {
	for _, mode := range []struct{ name, more string }{
		{"text", ""},
		{"stop", `,"stop":["zzz","STOPPED"]`},
		{"logprobs", `,"logprobs":true,"top_logprobs":5,"return_token_ids":true`},
	} {
		b.Run(mode.name, func(b *testing.B) {
			r, err := parseChat([]byte(`{"messages":[{"role":"user","content":"a"}],"stream":true`+mode.more+`}`), &Limits{MaxDepth: 64, MaxLogprobs: 20}, true, nil)
			if err != nil {
				b.Fatal(err)
			}
			g := &generation{params: &r.params, chat: true, prompts: []prompt{{ids: []int32{1}}}}
			s := newTestServer(b, newToyBackend(), nil)
			a := &answer{generation: g, tok: s.tok, id: "chatcmpl-" + randomID(), model: "toy", choices: s.newChoices(g)}
			head := a.appendHead([]byte("data: "))
			observe := s.metrics.observeRun(a)
			c := a.choices[0]
			res := wire.Result{Tokens: wire.Tokens{261}, StopToken: -1}
			if g.sampling.Logprobs {
				top := toyTop(toyScores([]int32{1}), 5)
				res.Logprobs, res.Top = wire.Floats{-1.25}, []wire.TokenLogprobs{top}
			}
			var buf []byte
			b.ReportAllocs()
			for b.Loop() {
				if err := c.apply(&res, s.tok); err != nil {
					b.Fatal(err)
				}
				res.Start++
				observe.result(c, 1)
				buf = append(a.appendChunk(append(buf[:0], head...), c), "\n\n"...)
				c.sent()
				_, _ = io.Discard.Write(buf)
			}
		})
	}
}

// BenchmarkStreams is the whole path over TCP: 32 streams at a time.
func BenchmarkStreams(b *testing.B) {
	const tokens = 200
	backend := &canned{}
	s := newTestServer(b, backend, nil)
	ts := listen(b, s)
	ts.Client().Transport.(*http.Transport).MaxIdleConnsPerHost = 32
	b.SetParallelism(32)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			resp, err := send(b.Context(), b, ts, chatPath, `{"messages":[{"role":"user","content":"a"}],"stream":true,"max_tokens":200}`)
			if err != nil {
				b.Error(err)
				return
			}
			_, _ = io.Copy(io.Discard, resp.Body)
			_ = resp.Body.Close()
		}
	})
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*tokens), "ns/token")
}

// BenchmarkParse reads a prompt of 100,000 ids and a chat of 1 MB.
func BenchmarkParse(b *testing.B) {
	limits := &Limits{MaxDepth: 64, MaxChoices: 1, VocabSize: 200_000}
	ids := appendIDs(nil, make([]int32, 100_000))
	for i := range ids {
		if ids[i] == '0' && i%3 == 0 {
			ids[i] = '7'
		}
	}
	bodies := map[string][]byte{
		"ids":  append(append([]byte(`{"prompt":`), ids...), '}'),
		"chat": []byte(`{"messages":[{"role":"user","content":"` + strings.Repeat(`words and \"quotes\" `, 50_000) + `"}]}`),
	}
	for name, body := range bodies {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(body)))
			for b.Loop() {
				var err error
				if name == "ids" {
					_, err = parseCompletion(body, limits, true)
				} else {
					_, err = parseChat(body, limits, true, nil)
				}
				if err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
