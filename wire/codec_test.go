package wire

import (
	"errors"
	"math/rand/v2"
	"reflect"
	"runtime"
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"
	"pgregory.net/rapid"
)

// headers are all headers that have a message.
func headers() []Header {
	var all []Header
	for h := range Header(128) {
		if _, unknown := newMessage(h).(*Unknown); !unknown {
			all = append(all, h)
		}
	}
	return all
}

// fill sets every field of v to a random non-zero value, lists to two elements.
func fill(t *testing.T, v reflect.Value, rng *rand.Rand) {
	switch v.Kind() {
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int32, reflect.Int64:
		n := int64(rng.Uint64())>>rng.IntN(32) | 1
		if v.Kind() == reflect.Int32 {
			n = int64(int32(n))
		}
		v.SetInt(n)
	case reflect.Uint8, reflect.Uint32, reflect.Uint64:
		v.SetUint(rng.Uint64()>>(64-v.Type().Bits()) | 1)
	case reflect.Float32, reflect.Float64:
		v.SetFloat(float64(float32(rng.NormFloat64())))
	case reflect.String:
		v.SetString(strings.Repeat("é", 1+rng.IntN(40)))
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(t, v.Elem(), rng)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range 2 {
			fill(t, v.Index(i), rng)
		}
	case reflect.Array:
		for i := range v.Len() {
			fill(t, v.Index(i), rng)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			fill(t, v.Field(i), rng)
		}
	default:
		t.Fatalf("no rule for %v", v.Type())
	}
}

func filled(t *testing.T, h Header, seed uint64) Message {
	m := newMessage(h)
	fill(t, reflect.ValueOf(m).Elem(), rand.New(rand.NewPCG(seed, uint64(h))))
	return m
}

func encode(t *testing.T, m Message) []byte {
	t.Helper()
	b, err := appendFrame(nil, m, 1<<30)
	if err != nil {
		t.Fatal(err)
	}
	return b[lengthSize:]
}

func TestEveryHeaderHasAMessage(t *testing.T) {
	if n := len(headers()); n != 42 {
		t.Fatalf("%d headers have messages, want 42", n)
	}
	for _, h := range headers() {
		if got := newMessage(h).Header(); got != h {
			t.Errorf("message of header %d says %d", h, got)
		}
		if want := reflect.TypeOf(newMessage(h)).Elem().Name(); h.String() != want {
			t.Errorf("header %d is called %q, want %q", h, h, want)
		}
	}
}

func TestRoundTrip(t *testing.T) {
	for _, h := range headers() {
		for seed := range uint64(20) {
			want := filled(t, h, seed)
			got, err := decodeFrame(encode(t, want))
			if err != nil {
				t.Fatalf("%v: %v", h, err)
			}
			if !reflect.DeepEqual(got, want) {
				t.Fatalf("%v:\n got %+v\nwant %+v", h, got, want)
			}
		}
	}
}

// split returns the encoded fields of a frame.
func split(t *testing.T, frame []byte) (head []byte, fields [][]byte) {
	t.Helper()
	_, rest, err := msgp.ReadArrayHeaderBytes(frame)
	if err != nil {
		t.Fatal(err)
	}
	_, rest, err = msgp.ReadUint8Bytes(rest)
	if err != nil {
		t.Fatal(err)
	}
	head = frame[:len(frame)-len(rest)]
	n, rest, err := msgp.ReadArrayHeaderBytes(rest)
	if err != nil {
		t.Fatal(err)
	}
	for range n {
		after, err := msgp.Skip(rest)
		if err != nil {
			t.Fatal(err)
		}
		fields = append(fields, rest[:len(rest)-len(after)])
		rest = after
	}
	return head, fields
}

func join(head []byte, fields [][]byte) []byte {
	b := msgp.AppendArrayHeader(append([]byte(nil), head...), uint32(len(fields)))
	for _, f := range fields {
		b = append(b, f...)
	}
	return b
}

// An older sender's message lacks trailing fields; a newer one's has more.
func TestOtherVersions(t *testing.T) {
	extra := msgp.AppendString(nil, "from the future")
	extra, _ = msgp.AppendIntf(extra, map[string]any{"a": []any{1, "b"}})
	more := [][]byte{extra[:len("from the future")+1], extra[len("from the future")+1:]}
	for _, h := range headers() {
		m := filled(t, h, 1)
		head, fields := split(t, encode(t, m))
		if got, err := decodeFrame(join(head, append(fields[:len(fields):len(fields)], more...))); err != nil || !reflect.DeepEqual(got, m) {
			t.Errorf("%v with two more fields: %+v, %v", h, got, err)
		}
		for n := range fields {
			want := filled(t, h, 1)
			for i := n; i < len(fields); i++ {
				reflect.ValueOf(want).Elem().Field(i).SetZero()
			}
			if got, err := decodeFrame(join(head, fields[:n])); err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("%v with %d of %d fields: %+v, %v", h, n, len(fields), got, err)
			}
		}
	}
	if got, err := decodeFrame([]byte{0x91, byte(HeaderPause)}); err != nil || !reflect.DeepEqual(got, &Pause{}) {
		t.Errorf("a frame of a header alone: %v, %v", got, err)
	}
}

// Structs inside messages grow by the same rule.
func TestOtherVersionsNested(t *testing.T) {
	long := &TokenLogprobs{IDs: Tokens{1}, Logprobs: Floats{-1}}
	b, _ := long.MarshalMsg(nil)
	b[0]++ // one more field
	b = msgp.AppendString(b, "more")
	short := []byte{0x91, 0xc4, 4, 1, 0, 0, 0} // one field of two
	list := append(append([]byte{0x92}, b...), short...)
	reply := &EngineReply{Results: []Result{{ID: 7}}}
	head, fields := split(t, encode(t, reply))
	_, result := split(t, append([]byte{0x92, 0}, fields[0][1:]...))
	result[4] = list // Top
	body := join([]byte{0x91}, result)
	got, err := decodeFrame(join(head, [][]byte{body}))
	want := &EngineReply{Results: []Result{{ID: 7, Top: []TokenLogprobs{*long, {IDs: Tokens{1}}}}}}
	if err != nil {
		t.Fatal(err)
	}
	got.(*EngineReply).Results[0].PromptTop = nil // an empty list
	if !reflect.DeepEqual(got, want) {
		t.Fatalf("\n got %+v\nwant %+v", got, want)
	}
}

func TestUnknownSurvivesRelay(t *testing.T) {
	frame := []byte{0x92, 0x77, 0x92, 0x01, 0xa1, 'x'}
	m, err := decodeFrame(frame)
	if err != nil {
		t.Fatal(err)
	}
	if u, ok := m.(*Unknown); !ok || u.Of != 0x77 {
		t.Fatalf("got %#v", m)
	}
	if again := encode(t, m); string(again) != string(frame) {
		t.Fatalf("relayed as % x", again)
	}
}

func TestMalformed(t *testing.T) {
	sampling := encode(t, &SubmitRequest{Prompt: Tokens{1, 2, 3}})
	for name, c := range map[string]struct {
		frame []byte
		words string
	}{
		"empty":             {nil, "unread"},
		"no array":          {[]byte{0x01}, "unread"},
		"no header":         {[]byte{0x90}, "no header"},
		"header too large":  {[]byte{0x92, 0xcd, 0x01, 0x00, 0x90}, "header"},
		"field of no array": {[]byte{0x92, 23, 0x01}, "AbortRequest"},
		"wrong type":        {[]byte{0x92, 23, 0x91, 0xa1, 'x'}, "ID"},
		"odd token bytes":   {[]byte{0x92, 20, 0x92, 0x01, 0xc4, 3, 1, 2, 3}, "Prompt"},
		"cut short":         {sampling[:len(sampling)-1], "unread"},
		"trailing bytes":    {append(sampling[:len(sampling):len(sampling)], 0), "after the message"},
		"lying list":        {[]byte{0x92, 21, 0x91, 0xdd, 0xff, 0xff, 0xff, 0xff}, "room"},
		"too many results":  {tooManyResults(), "limit"},
		"empty elements":    {append([]byte{0x92, 21, 0x91, 0xdc, 0x10, 0x00}, bytesOf(0x90, 4096)...), "room"},
		"deep":              {append(bytesOf(0x91, 40), 0x90), "nested"},
	} {
		m, err := decodeFrame(c.frame)
		var bad *MalformedError
		if !errors.As(err, &bad) || !strings.Contains(err.Error(), c.words) {
			t.Errorf("%s: got %v, %v; want a MalformedError that says %q", name, m, err, c.words)
		}
	}
}

func bytesOf(b byte, n int) []byte {
	out := make([]byte, n)
	for i := range out {
		out[i] = b
	}
	return out
}

func tooManyResults() []byte {
	b := []byte{0x92, 21, 0x91, 0xdd, 0, 1, 0, 1}
	for range 65537 {
		b = append(b, 0x91, 0xcd, 0, 1)
	}
	return b
}

// A frame cannot make the decoder allocate far more than its own size.
func TestDecodeAllocatesInProportion(t *testing.T) {
	worst := &EngineReply{Results: make([]Result, 500)}
	for i := range worst.Results {
		worst.Results[i].Top = make([]TokenLogprobs, 60)
	}
	for name, frame := range map[string][]byte{
		"lying":     {0x92, 27, 0x99, 0xa0, 0xa0, 0, 0xa0, 0x90, 0xa0, 0xdd, 0x7f, 0xff, 0xff, 0xff, 0},
		"legal":     encode(t, worst),
		"dense top": append([]byte{0x92, 21, 0x91, 0x91, 0x95, 0, 0, 0xc4, 0, 0xc4, 0, 0xdc, 0xff, 0xff}, bytesOf(0, 4*65535)...),
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		decodeFrame(frame)
		runtime.ReadMemStats(&after)
		if got, limit := after.TotalAlloc-before.TotalAlloc, uint64(8192+32*len(frame)); got > limit {
			t.Errorf("%s: %d bytes allocated for a frame of %d", name, got, len(frame))
		}
	}
}

func TestTokensRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		toks := Tokens(rapid.SliceOf(rapid.Int32()).Draw(t, "tokens"))
		floats := Floats(rapid.SliceOf(rapid.Float32()).Draw(t, "floats"))
		b, _ := toks.MarshalMsg(nil)
		if len(b) > toks.Msgsize() {
			t.Fatalf("%d bytes, Msgsize said %d", len(b), toks.Msgsize())
		}
		b, _ = floats.MarshalMsg(b)
		var gotToks Tokens
		var gotFloats Floats
		rest, err := gotToks.UnmarshalMsg(b)
		if err != nil {
			t.Fatal(err)
		}
		if rest, err = gotFloats.UnmarshalMsg(rest); err != nil || len(rest) > 0 {
			t.Fatalf("%d bytes left, %v", len(rest), err)
		}
		if len(gotToks) != len(toks) || len(gotFloats) != len(floats) {
			t.Fatal("lengths differ")
		}
		for i := range toks {
			if gotToks[i] != toks[i] {
				t.Fatalf("token %d", i)
			}
		}
		for i := range floats {
			if gotFloats[i] != floats[i] {
				t.Fatalf("float %d", i)
			}
		}
	})
}

func FuzzDecodeFrame(f *testing.F) {
	for _, h := range headers() {
		b, err := appendFrame(nil, newMessage(h), 1<<20)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b[lengthSize:])
	}
	f.Fuzz(func(t *testing.T, frame []byte) {
		m, err := decodeFrame(frame)
		if err != nil {
			return
		}
		// What decodes encodes, and then decodes to the same.
		b, err := appendFrame(nil, m, 1<<30)
		if err != nil {
			t.Fatal(err)
		}
		again, err := decodeFrame(b[lengthSize:])
		if err != nil {
			t.Fatalf("%v from the wire does not decode again: %v", m.Header(), err)
		}
		b2, err := appendFrame(nil, again, 1<<30)
		if err != nil || string(b) != string(b2) {
			t.Fatalf("%v changed on its way:\n%x\n%x (%v)", m.Header(), b, b2, err)
		}
	})
}
