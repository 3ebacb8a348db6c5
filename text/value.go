package text

import (
	"bytes"
	"encoding/json/jsontext"
	"errors"
	"fmt"
	"io"
	"slices"
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

// hide leaves members out of the objects of an array. What is not an array of objects stays as it is, for others to refuse.
func hide(raw []byte, names []string) ([]byte, error) {
	if !mentions(raw, names) {
		return raw, nil
	}
	d := jsontext.NewDecoder(bytes.NewBuffer(raw), readOptions)
	if d.PeekKind() != '[' {
		return raw, nil
	}
	if _, err := d.ReadToken(); err != nil {
		return nil, err
	}
	out := []byte{'['}
	for d.PeekKind() != ']' {
		v, err := d.ReadValue()
		if err != nil {
			return nil, err
		}
		if v, err = hideMembers(v, names); err != nil {
			return nil, err
		}
		if len(out) > 1 {
			out = append(out, ',')
		}
		out = append(out, v...)
	}
	if _, err := d.ReadToken(); err != nil {
		return nil, err
	}
	// Whatever follows the array is still there to be refused.
	return append(append(out, ']'), raw[d.InputOffset():]...), nil
}

// mentions reports whether one of the names may be that of a member.
func mentions(raw []byte, names []string) bool {
	return slices.ContainsFunc(names, func(name string) bool { return bytes.Contains(raw, []byte(`"`+name+`"`)) })
}

// hideMembers leaves members out of an object. Other values stay as they are.
func hideMembers(raw []byte, names []string) ([]byte, error) {
	if !mentions(raw, names) {
		return raw, nil
	}
	d := jsontext.NewDecoder(bytes.NewBuffer(raw), readOptions)
	if d.PeekKind() != '{' {
		return raw, nil
	}
	if _, err := d.ReadToken(); err != nil {
		return nil, err
	}
	out := []byte{'{'}
	for d.PeekKind() != '}' {
		name, err := d.ReadValue()
		if err != nil {
			return nil, err
		}
		name = slices.Clone(name)
		v, err := d.ReadValue()
		if err != nil {
			return nil, err
		}
		if slices.Contains(names, string(name[1:len(name)-1])) {
			continue
		}
		if len(out) > 1 {
			out = append(out, ',')
		}
		out = append(append(append(out, name...), ':'), v...)
	}
	_, err := d.ReadToken()
	return append(out, '}'), err
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
