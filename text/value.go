package text

import (
	"encoding/json/jsontext"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/ardanlabs/jinja"
)

const (
	maxValueBytes = 64 << 20
	maxValueDepth = 128
)

// decodeValue reads JSON into a template's values, objects keeping their order; of equal names the
// last counts. Every string, names too, goes through text.
func decodeValue(raw jsontext.Value, text func(string) string) (jinja.Value, error) {
	if len(raw) > maxValueBytes {
		return jinja.None(), fmt.Errorf("larger than %d MiB: %w", maxValueBytes>>20, ErrLimit)
	}
	d := jsontext.NewDecoder(strings.NewReader(string(raw)), readOptions)
	v, err := readValue(d, text)
	if err != nil {
		return jinja.None(), err
	}
	if _, err := d.ReadToken(); err != io.EOF {
		return jinja.None(), errors.New("more than one JSON value")
	}
	return v, nil
}

func readValue(d *jsontext.Decoder, text func(string) string) (jinja.Value, error) {
	t, err := d.ReadToken()
	if err != nil {
		return jinja.None(), err
	}
	if d.StackDepth() > maxValueDepth {
		return jinja.None(), fmt.Errorf("nested deeper than %d: %w", maxValueDepth, ErrLimit)
	}
	switch t.Kind() {
	case 'n':
		return jinja.None(), nil
	case 't', 'f':
		return jinja.NewBool(t.Bool()), nil
	case '"':
		return jinja.NewString(text(t.String())), nil
	case '0':
		return numberValue(t.String()), nil
	case '[':
		var items []jinja.Value
		for d.PeekKind() != ']' {
			item, err := readValue(d, text)
			if err != nil {
				return item, err
			}
			items = append(items, item)
		}
		_, err := d.ReadToken()
		return jinja.NewList(items), err
	}
	dict := jinja.NewDict()
	for d.PeekKind() != '}' {
		name, err := d.ReadToken()
		if err != nil {
			return dict, err
		}
		key := text(name.String())
		value, err := readValue(d, text)
		if err != nil {
			return dict, err
		}
		dict.AsDict().Set(key, value)
	}
	_, err = d.ReadToken()
	return dict, err
}

// numberValue keeps integers apart from floats, as Python does. Integers beyond 64 bits become floats.
func numberValue(s string) jinja.Value {
	if !strings.ContainsAny(s, ".eE") {
		if n, err := strconv.ParseInt(s, 10, 64); err == nil {
			return jinja.NewInt(n)
		}
	}
	f, _ := strconv.ParseFloat(s, 64) // beyond the range: ±Inf, as in Python
	return jinja.NewFloat(f)
}
