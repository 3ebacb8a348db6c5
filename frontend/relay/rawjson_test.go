package relay

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net/http/httputil"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"pgregory.net/rapid"
)

func TestScanObject(t *testing.T) {
	for _, c := range []struct {
		text string
		want map[string]string
		at   int // of the error
	}{
		{text: `{}`, want: map[string]string{}},
		{text: " { \"a\" : 1 , \"b\":[1,2 ,3]\n} ", want: map[string]string{"a": "1", "b": "[1,2 ,3]"}},
		{text: `{"a":"x\"}y","b\u0063":{"d":[{}]},"e":-1.5E+3}`, want: map[string]string{"a": `"x\"}y"`, "bc": `{"d":[{}]}`, "e": "-1.5E+3"}},
		{text: `{"a":"\\","b":true,"c":null,"d":false}`, want: map[string]string{"a": `"\\"`, "b": "true", "c": "null", "d": "false"}},
		{text: `{"id":9007199254740993}`, want: map[string]string{"id": "9007199254740993"}},
		{text: `{"a":1,"a":2}`, want: map[string]string{"a": "2"}},
		{text: `{"a":["]",1]}`, want: map[string]string{"a": `["]",1]`}},
		{text: `[]`, at: 0},
		{text: `{"a"}`, at: 4},
		{text: `{"a":}`, at: 5},
		{text: `{"a":1 2}`, at: 7},
		{text: `{"a":nul}`, at: 5},
		{text: `{"a":x}`, at: 5},
		{text: `{"a":"x}`, at: 5},
		{text: `{"a":[1}}`, at: 7},
		{text: `{"a":[1`, at: 7},
		{text: `{"a":1}{`, at: 7},
		{text: `{"a":1,}`, at: 7},
		{text: ``, at: 0},
		{text: `{"a":` + strings.Repeat("[", 600) + strings.Repeat("]", 600) + "}", at: 5 + maxNested},
	} {
		o, err := scanObject([]byte(c.text))
		if c.want == nil {
			var syntax *syntaxError
			if !errors.As(err, &syntax) || syntax.offset != c.at {
				t.Errorf("%.40q: %v, want an error at %d", c.text, err, c.at)
			}
			continue
		}
		got := map[string]string{}
		for i := range o.fields {
			got[string(o.fields[i].name)] = string(o.get(string(o.fields[i].name)))
		}
		if err != nil || !maps.Equal(got, c.want) {
			t.Errorf("%.40q: %v, %v", c.text, got, err)
		}
	}
	if _, err := scanObject([]byte(`{` + strings.Repeat(`"a":1,`, maxFields) + `"b":1}`)); err == nil {
		t.Error("too many fields are taken")
	}
	if list, err := scanArray([]byte(` [ {"a":[1]} , "x,y" ,3 ] `), 3); err != nil || len(list) != 3 || string(list[0]) != `{"a":[1]}` || string(list[1]) != `"x,y"` {
		t.Errorf("%q, %v", list, err)
	}
	for _, text := range []string{`[1,2,3]`, `[1,]`, `[1`, `{}`, `[1] 2`} {
		if list, err := scanArray([]byte(text), 2); err == nil {
			t.Errorf("%s is taken for %q", text, list)
		}
	}
}

// Whatever is JSON is scanned as encoding/json reads it; what is not must not panic.
func FuzzScanObject(f *testing.F) {
	f.Add([]byte(`{"a":[1,2,{"b":"\"]"}],"c\u0064":-1e5,"e":null}`))
	f.Add([]byte(`{"prompt":[1,2,3],"x":"\\"}`))
	f.Add([]byte(`{"m":[{"ids":[1,2, 3 ],"p":[-0.5]},[[1],["]"],[],[null]],[1,{"a":[2]}],[1,[2]]],"x":[3]}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		o, err := scanObject(raw)
		var want map[string]json.RawMessage
		if !utf8.Valid(raw) || !json.Valid(raw) || json.Unmarshal(raw, &want) != nil || want == nil {
			return // the scan may be laxer
		}
		if err != nil {
			if len(want) > 100 || bytes.Count(raw, []byte("{"))+bytes.Count(raw, []byte("[")) > maxNested || len(raw) > 4*maxFields {
				return // the limits
			}
			t.Fatalf("%q: %v", raw, err)
		}
		for name, value := range want {
			if strings.ContainsRune(name, '\uFFFD') {
				continue // names that are no UTF-8
			}
			if got := o.get(name); !bytes.Equal(got, value) {
				t.Fatalf("%q: %s is %q, want %q", raw, name, got, value)
			}
		}
	})
}

// An edited object has the fields that it should, each with its bytes.
func TestEdit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		names := []string{"a", "b", `c"`, "d\\", "e"}
		values := []string{`1`, ` [1, 2] `, `"x,}"`, `{"y": {"z":[]}}`, `9007199254740993`, `null`}
		text := "{"
		want := map[string]string{}
		for i, n := 0, rapid.IntRange(0, 6).Draw(t, "n"); i < n; i++ {
			if i > 0 {
				text += " ,"
			}
			name, value := rapid.SampledFrom(names).Draw(t, "name"), rapid.SampledFrom(values).Draw(t, "value")
			quoted, _ := json.Marshal(name)
			text += " " + string(quoted) + " : " + value
			want[name] = strings.TrimSpace(value)
		}
		text += " }"
		var e edit
		for range rapid.IntRange(0, 2).Draw(t, "drops") {
			name := rapid.SampledFrom(names).Draw(t, "drop")
			e.remove(name)
			delete(want, name)
		}
		for _, name := range rapid.SliceOfNDistinct(rapid.SampledFrom(names), 0, 3, rapid.ID).Draw(t, "puts") {
			value := rapid.SampledFrom(values).Draw(t, "put")
			e.put(name, []byte(value))
			want[name] = strings.TrimSpace(value)
		}
		o, err := scanObject([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		made := e.apply(&o)
		if made.size() != len(made.join()) || !json.Valid(made.join()) {
			t.Fatalf("%s became %s", text, made.join())
		}
		changed, err := scanObject(made.join())
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]string{}
		for i := range changed.fields {
			name := string(changed.fields[i].name)
			got[name] = string(changed.get(name))
		}
		if !maps.Equal(got, want) {
			t.Fatalf("%s became %s", text, made.join())
		}
	})
}

func TestAppendString(t *testing.T) {
	for _, s := range []string{"", `a"b\c`, "\n\t\x00\x1f", "é😀", "\xff"} {
		var back string
		if err := json.Unmarshal(appendString(nil, s), &back); err != nil || back != strings.ToValidUTF8(s, "\uFFFD") {
			t.Errorf("%q became %q, %v", s, back, err)
		}
	}
}

// Behaviour 30: ids cross as base64 of little-endian int32, the negative and the empty too.
func TestIDs(t *testing.T) {
	for text, ids := range map[string][]int32{"": {}, "AQAAAP////8AAACA": {1, -1, -1 << 31}} {
		if got := EncodeIDs(ids); got != text {
			t.Errorf("%v: %q, want %q", ids, got, text)
		}
		if got, err := DecodeIDs(text); err != nil || !slices.Equal(got, ids) {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
	for _, bad := range []string{"AQ", "AQAA", "*"} {
		if got, err := DecodeIDs(bad); err == nil {
			t.Errorf("%q is taken for %v", bad, got)
		}
	}
	for text, ids := range map[string][]int32{"[]": {}, "[ 1 ,-2,2147483647]": {1, -2, 1<<31 - 1}} {
		if got, err := parseIDs([]byte(text)); err != nil || !slices.Equal(got, ids) {
			t.Errorf("%s: %v, %v", text, got, err)
		}
	}
	for _, bad := range []string{"", "[", "[1,]", "[,1]", "[1.5]", "[2147483648]", `["1"]`, "1"} {
		if got, err := parseIDs([]byte(bad)); err == nil {
			t.Errorf("%s is taken for %v", bad, got)
		}
	}
}

func FuzzUsage(f *testing.F) {
	f.Add([]byte("data: {\"usage\": {\"prompt_tokens\":1,\"completion_tokens\":2}}\n\ndata: [DONE]\n\n"), uint8(3))
	f.Fuzz(func(t *testing.T, events []byte, cut uint8) {
		prompt := []byte(`{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":3}}`)
		var m eventBuffer
		var out []byte
		for rest := events; len(rest) > 0; {
			n := min(len(rest), int(cut)+1)
			out = append(out, mergeEvents(m.next(rest[:n]), prompt)...)
			rest = rest[n:]
		}
		out = append(out, m.rest()...)
		if !hasUsage(events) && !bytes.Equal(out, events) {
			t.Fatalf("%q became %q", events, out)
		}
		lastUsage(events)
	})
}

// Behaviour 37: the prompt's usage is the prefill leg's. However a stream is cut, whatever its lines end with and its events
// have beside data, the merged one is the same, and an event is let go as soon as it is whole.
func TestMergeEvents(t *testing.T) {
	const (
		event = "data: {\"choices\":[{\"delta\":{\"content\":\"say \\\"usage\\\":{\"}}],\"usage\":null}\n\n"
		odd   = ": a comment\nid: 7\ndata: {\"usage\" : null}\nevent: message\n\n: another\n\n"
		last  = "event: message\ndata: {\"choices\":[],\"usage\": {\"prompt_tokens\":9,\"completion_tokens\":4,\"total_tokens\":13,\"x\":9007199254740993}}\nid: 8\n\n"
		again = "data:{\"choices\":[],\ndata:  \"usage\" :\t{\"completion_tokens\":4}\ndata:}\n\n"
		done  = "data: [DONE]\n\n"
		usage = `"prompt_tokens":10,"total_tokens":14,"prompt_tokens_details":{"cached_tokens":8}}}` + "\n"
		want  = event + odd + "event: message\n" + `data: {"choices":[],"usage":{"completion_tokens":4,"x":9007199254740993,` + usage + "id: 8\n\n" +
			`data: {"choices":[],"usage":{"completion_tokens":4,` + usage + "\n" + done
	)
	prompt := []byte(`{"prompt_tokens":10,"prompt_tokens_details":{"cached_tokens":8}}`)
	for _, end := range []string{"\n", "\r\n", "\r"} {
		stream, want := strings.ReplaceAll(event+odd+last+again+done, "\n", end), strings.ReplaceAll(want, "\n", end)
		for n := 1; n <= len(stream); n++ {
			var m eventBuffer
			var out []byte
			for at := 0; at < len(stream); at += n {
				out = append(out, mergeEvents(m.next([]byte(stream[at:min(at+n, len(stream))])), prompt)...)
			}
			if out = append(out, m.rest()...); string(out) != want {
				t.Fatalf("%q, cut every %d bytes:\n%q\nwant\n%q", end, n, out, want)
			}
		}
		var m eventBuffer
		for _, one := range []string{event, last, again, done} {
			one = strings.ReplaceAll(one, "\n", end)
			if out := m.next([]byte(one)); string(out) != one {
				t.Errorf("%q is whole; %q goes on", one, out)
			}
		}
	}
}

// What is no usage stays as it came.
func TestMergeUsage(t *testing.T) {
	prompt := []byte(`{"prompt_tokens":10}`)
	for _, c := range []struct{ answer, want string }{
		{`{"usage":{"prompt_tokens":9,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":9}}}`, `{"usage":{"completion_tokens":4,"prompt_tokens":10,"total_tokens":14,"prompt_tokens_details":null}}`},
		{`{"usage":null}`, `{"usage":null}`},
		{`{"a":1}`, `{"a":1}`},
		{`{"usage":[1]}`, `{"usage":[1]}`},
		{`{"usage":{"completion_tokens":"4"}}`, `{"usage":{"completion_tokens":"4"}}`},
		{`not JSON`, `not JSON`},
	} {
		if got := string(mergeUsage([]byte(c.answer), prompt).join()); got != c.want {
			t.Errorf("%s became %s", c.answer, got)
		}
	}
	if n := cachedTokens([]byte(`{"prompt_tokens_details":{"cached_tokens":12}}`)); n != 12 {
		t.Errorf("%d cached tokens", n)
	}
}

// However a body's chunks are cut, what is forwarded are its chunks but the last.
func TestChunks(t *testing.T) {
	const plain = "5\r\nhello\r\nA\r\n\r\n0\r\n\r\n0\r\n\r\n1\r\nx\r\n"
	for _, body := range []string{
		plain + "0\r\nTrailer: x\r\n\r\n",
		"5;a=\"b;c\"\r\nhello\r\nA \t\r\n\r\n0\r\n\r\n0\r\n\r\n1 ;a;b=" + strings.Repeat("c", 100) + "\r\nx\r\n0;end\r\n\r\n",
	} {
		testChunks(t, body, plain)
	}
	for _, bad := range []string{
		"5\nhello", "\r\n", "x\r\n", "5x\r\n", ";a=b\r\n", "5 5\r\n", "5;a\rb\r\n", "1\r\nxy\r\n", "-1\r\n", "1234567890123456\r\n",
		strings.Repeat("0", maxLine+1), "1;" + strings.Repeat("a", maxLine) + "\r\n",
	} {
		var c chunks
		if _, _, err := c.scan([]byte(bad)); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}

func testChunks(t *testing.T, body, plain string) {
	t.Helper()
	for n := 1; n <= len(body); n++ {
		var c chunks
		var out, held []byte
		for at := 0; at < len(body); at += n {
			held = append(held, body[at:min(at+n, len(body))]...)
			forward, taken, err := c.scan(held)
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, forward...)
			held = held[taken:]
		}
		if string(out) != plain || !c.end || len(held) > 0 || !c.between() {
			t.Fatalf("in pieces of %d: %q, %+v, %q is left", n, out, c, held)
		}
	}
}

// What goes on is what the standard library's reader reads, there and from the body itself, where it takes that: it takes no
// space before extensions.
func FuzzChunks(f *testing.F) {
	f.Add([]byte("5\r\nhello\r\n0\r\n\r\n"), uint8(2))
	f.Add([]byte("5;a=b\r\nhello\r\n1 ;c\r\nx\r\n0;d\r\n\r\n"), uint8(200))
	f.Fuzz(func(t *testing.T, body []byte, cut uint8) {
		var out, held, data []byte
		c := chunks{data: func(b []byte) { data = append(data, b...) }}
		for rest := body; len(rest) > 0 && !c.end; {
			n := min(len(rest), int(cut)+1)
			held = append(held, rest[:n]...)
			rest = rest[n:]
			forward, taken, err := c.scan(held)
			if len(forward) > taken || taken > len(held) {
				t.Fatalf("%d go on, taken %d of %d", len(forward), taken, len(held))
			}
			out = append(out, forward...)
			if err != nil {
				return
			}
			held = held[taken:]
		}
		if !c.end {
			return
		}
		got, err := io.ReadAll(httputil.NewChunkedReader(strings.NewReader(string(out) + "0\r\n\r\n")))
		if err != nil || !bytes.Equal(got, data) {
			t.Fatalf("%q forwards %q, %v", body, out, err)
		}
		if want, err := io.ReadAll(httputil.NewChunkedReader(bytes.NewReader(body))); err == nil && !bytes.Equal(got, want) {
			t.Fatalf("%q is %q, not %q", body, want, got)
		}
	})
}
