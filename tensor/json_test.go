package tensor

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"testing"
)

// picky refuses everything by itself.
type picky struct{}

func (*picky) UnmarshalJSONFrom(d *jsontext.Decoder) error {
	_ = d.SkipValue()
	return errors.New("is not to its taste")
}

// Faults of a document are told in the document's words.
func TestJSONProblem(t *testing.T) {
	type inner struct {
		Factor float64 `json:"factor"`
	}
	type document struct {
		Layers int      `json:"layers"`
		Size   uint64   `json:"size"`
		Rope   *inner   `json:"rope"`
		Names  []string `json:"names"`
		Tie    bool     `json:"tie"`
		Picky  picky    `json:"picky"`
	}
	for text, want := range map[string][2]string{
		`{"layers":"four"}`:       {"layers", "is a string, expected an integer"},
		`{"layers":1.5}`:          {"layers", "is 1.5, expected an integer"},
		`{"layers":1e30}`:         {"layers", "is 1e30, expected an integer"},
		`{"size":-1}`:             {"size", "is -1, expected an integer from 0 on"},
		`{"rope":7}`:              {"rope", "is a number, expected an object"},
		`{"rope":{"factor":"x"}}`: {"rope/factor", "is a string, expected a number"},
		`{"names":{}}`:            {"names", "is an object, expected an array"},
		`{"names":["a",true]}`:    {"names/1", "is true or false, expected a string"},
		`{"tie":"no"}`:            {"tie", "is a string, expected true or false"},
		`{"picky":1}`:             {"picky", "is not to its taste"},
		`[1]`:                     {"", "is an array, expected an object"},
		`{`:                       {"", "is no valid JSON: unexpected EOF after offset 1"},
		`{"layers":1,"layers":2}`: {"", `is no valid JSON: duplicate object member name "layers"`},
	} {
		var d document
		err := json.Unmarshal([]byte(text), &d)
		if err == nil {
			t.Errorf("%s is accepted", text)
			continue
		}
		if member, problem := JSONProblem(err); [2]string{member, problem} != want {
			t.Errorf("%s: %q, %q; want %q (from %v)", text, member, problem, want, err)
		}
	}
}
