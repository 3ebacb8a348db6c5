package frontend

import (
	"bytes"
	"encoding/json"
	"encoding/json/jsontext"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// TestNumbers: lists of numbers are taken as encoding/json takes them, wherever in eight bytes something stands.
func TestNumbers(t *testing.T) {
	check := func(list string) {
		t.Helper()
		want := 0
		if end := strings.IndexByte(list, ']') + 1; isNumbers(list[:end]) {
			want = end
		}
		if got := numbers([]byte(list)); got != want {
			t.Errorf("[%s: %d bytes, want %d", list, got, want)
		}
	}
	parts := []string{
		"1", "12", "151643", "0", "01", "00", "-1", "-0", "1.5", "-0.25e-7", "1e5", "1E+5", "1.", ".5", "1e", "1e+", "-", "+1", "1 2", "1,,2", "1, 2", "1 ,2", "1,  2", "1,\n2", "1,\t2",
		"", ",", "a", "\"1\"", "[1]", "{}", "null", "1\x002", "1\xff2", "\xb1", strings.Repeat("9", 400), "1" + strings.Repeat("0", 30) + ".5", ":", ";", "/", "1-2", "1\v2", "1, \f2",
	}
	for _, p := range parts {
		for before := range 10 {
			for after := range 4 {
				list := strings.Repeat("7", before) + strings.Repeat(",", min(before, 1)) + p + strings.Repeat(",123456", after)
				check(list + "]")
				check(list)
				check(strings.Repeat("1234567,", 3) + list + "],[4]")
				check(strings.Repeat("123, ", 3) + list + " ] , 4")
			}
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		list := []byte(strings.Join(rapid.SliceOfN(rapid.StringMatching(`[ ]?(0|[1-9][0-9]{0,6}|-?[0-9]{1,2}(\.[0-9]{1,9})?)`), 0, 30).Draw(t, "numbers"), ","))
		if n := len(list); n > 0 && rapid.Bool().Draw(t, "damaged") {
			list[rapid.IntRange(0, n-1).Draw(t, "at")] = rapid.SampledFrom([]byte("0,-. \n5e\"[{\x00\x80")).Draw(t, "byte")
		}
		closed := string(list) + "]"
		if got, want := numbers([]byte(closed)), isNumbers(closed); got != 0 != want {
			t.Fatalf("[%s: %d, want %v", closed, got, want)
		}
	})
}

// isNumbers says by encoding/json whether an array, without the bracket that opens it, is of numbers, at least one.
func isNumbers(list string) bool {
	return json.Valid([]byte("["+list)) && !strings.ContainsAny(list, `[{"n`) && strings.ContainsAny(list, "0123456789")
}

// FuzzScan: a shortened body is valid when jsontext says that the body is, and what is valid has the members and
// elements that jsontext finds.
func FuzzScan(f *testing.F) {
	long := strings.Repeat("123456,", 20)
	for _, body := range []string{
		``, ` `, `{}`, `[]`, `{"a":1}`, `{"a":[` + long + `1]}`, `{"a":[` + long + `1],"a":2}`, `{"a":[` + long + `]}`, `{"a":[` + long + `01]}`, `{"a":[[` + long + `1], {"b":[` + long + `1.5e-7 ]}]}`,
		`{"a":"[` + long + `1]","b\"c":[1,"]",2]}`, `{"a\":[` + long + `1]}`, `{"a":"\\","b":"\\\"","\u0061":[-1,2]}`, `[` + long + `1] [` + long + `1]`, `{"a":[1,[2,[3,{"b":"]"}]]]}`, `{"a":1}{`, `"\ud800"`, "{\"\xff\":1}",
		` { "a" : [ 1 , 2 ] , "b" : { } , "c" : [ ] , "d" : null , "e" : true } `, `[` + strings.Repeat("9", 400) + `]`, `{"a":[` + strings.Repeat("[", 70) + `1` + strings.Repeat("]", 70) + `]}`,
	} {
		f.Add([]byte(body))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		short, deepest := shorten(body)
		valid := jsontext.Value(body).IsValid()
		if jsontext.Value(short).IsValid() != valid {
			t.Fatalf("%q is valid: %v; shortened to %q it is not so", body, valid, short)
		}
		err := decodeObject(body, 64, func(string, value) error { return nil })
		switch object := valid && jsontext.Value(body).Kind() == '{'; {
		case !valid:
			if err == nil {
				t.Fatalf("%q is read", body)
			}
			return
		case object && deepest <= 64 && err != nil:
			t.Fatalf("%q is not read: %v", body, err)
		}
		raw := bytes.Trim(body, " \t\r\n")
		if depth := compareScan(t, value{raw: raw}, body, len(body)-len(bytes.TrimLeft(body, " \t\r\n"))); depth != deepest {
			t.Fatalf("%q is %d deep, not %d", body, depth, deepest)
		}
	})
}

// compareScan compares what is found in a value with what jsontext finds in it, and gives its depth. It begins at a place in body.
func compareScan(t *testing.T, v value, body []byte, at int) (depth int) {
	if v.at = at; !bytes.HasPrefix(body[at:], v.raw) {
		t.Fatalf("%q is not at %d of %q", v.raw, at, body)
	}
	d := jsontext.NewDecoder(bytes.NewBuffer(bytes.Clone(v.raw)))
	expect := func(m value) {
		want, err := d.ReadValue()
		if err != nil || !bytes.Equal(m.raw, want) {
			t.Fatalf("%q: %q, want %q (%v)", v.raw, m.raw, want, err)
		}
		depth = max(depth, compareScan(t, m, body, m.at))
	}
	var err error
	switch v.kind() {
	case jsontext.KindBeginArray:
		_, _ = d.ReadToken()
		err = v.elements("", func(_ int, e value) error { expect(e); return nil })
	case jsontext.KindBeginObject:
		_, _ = d.ReadToken()
		err = v.members(func(name string, m value) error {
			if token, err := d.ReadToken(); err != nil || token.String() != name {
				t.Fatalf("%q: name %q, want %q (%v)", v.raw, name, token, err)
			}
			expect(m)
			return nil
		})
	default:
		return 0
	}
	if end := d.PeekKind(); err != nil || end != ']' && end != '}' {
		t.Fatalf("%q: %v, and then %v", v.raw, err, end)
	}
	return depth + 1
}

// TestReadSized: bodies are read whole whatever is said of their size, and a size alone gets little memory.
func TestReadSized(t *testing.T) {
	whole := bytes.Repeat([]byte("0123456789abcdef"), 20_000)
	for _, n := range []int{0, 1, 511, 512, firstBody - 1, firstBody, firstBody + bytes.MinRead, len(whole)} {
		for _, said := range []int64{-1, 0, int64(n), int64(n) / 2, 1 << 40} {
			for range 2 { // the second time with a spare
				b, err := readSized(io.MultiReader(bytes.NewReader(whole[:n/3]), bytes.NewReader(whole[n/3:n])), said)
				if err != nil || !bytes.Equal(b, whole[:n]) {
					t.Fatalf("%d bytes, said to be %d: %d, %v", n, said, len(b), err)
				}
				if most := max(firstBody+bytes.MinRead, (bodyGrowth+1)*n+n/8*bodyGrowth); said > 1<<30 && cap(b) > max(most, maxSpare) {
					t.Errorf("%d bytes, said to be %d, take %d", n, said, cap(b))
				}
				spare(b)
			}
		}
	}
	wrong := errors.New("wrong")
	if _, err := readSized(io.MultiReader(strings.NewReader("a"), errorReader{wrong}), 5); !errors.Is(err, wrong) {
		t.Error(err)
	}
}

type errorReader struct{ err error }

func (r errorReader) Read([]byte) (int, error) { return 0, r.err }

// TestAppendIDs: ids are printed as fmt prints them.
func TestAppendIDs(t *testing.T) {
	for n := int64(1); n <= 1<<31; n *= 2 {
		for _, id := range []int64{n - 1, n, n/10*10 + 9, n / 1000 * 1000} {
			if id = min(id, 1<<31-1); string(appendIDs([]byte("x"), []int32{int32(id), 7, int32(id)})) != fmt.Sprintf("x[%d,7,%d]", id, id) {
				t.Errorf("%d becomes %s", id, appendIDs(nil, []int32{int32(id)}))
			}
		}
	}
	for id := range int32(200_000) {
		if got := string(appendIDs(nil, []int32{id})); got != fmt.Sprintf("[%d]", id) {
			t.Fatalf("%d becomes %s", id, got)
		}
	}
}
