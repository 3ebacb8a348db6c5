package text

import (
	"context"
	"encoding/json/jsontext"
	"strings"
	"time"

	"github.com/ardanlabs/jinja"
)

// traits is what was found out about a template by trying it.
type traits struct {
	partLists       bool // it shows a list of one text part as it shows the text
	decodeArguments bool // it formats tool-call arguments itself, and spoils them, or does not take them apart, if they are a string
	nullContent     bool // it shows calls only beside content that is null
	textContent     bool // or only beside content that is a string
}

const (
	probeText      = "needle in a haystack"
	probeArguments = `{"needle": "haystack"}`
)

// probe renders small conversations to learn a template's traits.
func (tm *Template) probe() traits {
	try := func(messages string) string {
		vars, err := tm.variables(Chat{Messages: []byte(messages)}, &marker{clash: map[rune]bool{}})
		if err != nil {
			return ""
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		text, err := tm.execute(ctx, vars, time.Unix(0, 0).UTC())
		if err != nil {
			return ""
		}
		return text
	}
	asText := try(`[{"role":"user","content":"` + probeText + `"}]`)
	asParts := try(`[{"role":"user","content":[{"type":"text","text":"` + probeText + `"}]}]`)
	call := func(content, arguments string) string {
		return try(`[{"role":"user","content":"ask"},{"role":"assistant","content":` + content + `,"tool_calls":[{"id":"abcdefghi",` +
			`"type":"function","function":{"name":"find","arguments":` + arguments + `}}]}]`)
	}
	quoted, _ := jsontext.AppendQuote(nil, probeArguments)
	shows := func(content string) (yes bool, nones int) {
		both := call(content, probeArguments) + call(content, string(quoted))
		return strings.Contains(both, "needle"), strings.Count(both, "None")
	}
	text, nones := shows(`""`)
	null, more := shows("null")
	null = null && (!text || more <= nones) // not one that prints the null
	content := `""`
	if null && !text {
		content = "null"
	}
	return traits{
		partLists:       asParts != "" && asParts == asText && strings.Contains(asText, probeText),
		decodeArguments: takesApart(call(content, probeArguments), call(content, string(quoted))),
		nullContent:     null && !text,
		textContent:     text && !null,
	}
}

// takesApart reports whether a template does more with arguments that are an object than to print them. The other text is what it
// makes of them as a string.
func takesApart(object, text string) bool {
	printed := strings.Contains(object, `"needle":`) || strings.Contains(object, `'needle':`)
	return strings.Contains(object, "needle") && (!printed || !strings.Contains(text, probeArguments))
}

// adapt changes decoded messages into what the template can take.
func (tm *Template) adapt(messages jinja.Value, m *marker) {
	for _, message := range messages.AsList().Items {
		if !message.IsDict() {
			continue
		}
		d := message.AsDict()
		if content, ok := d.Get("content"); ok && content.IsList() && !tm.traits().partLists {
			if joined, ok := joinParts(content.AsList().Items); ok {
				d.Set("content", jinja.NewString(joined))
			}
		}
		calls, ok := d.Get("tool_calls")
		if !ok || !calls.IsList() || calls.AsList().Len() == 0 {
			continue
		}
		if tm.traits().decodeArguments {
			for _, call := range calls.AsList().Items {
				decodeArguments(call, m)
			}
		}
		content, ok := d.Get("content")
		switch blank := !ok || content.IsNone() || content.IsString() && content.AsString() == ""; {
		case blank && tm.traits().nullContent:
			d.Set("content", jinja.None())
		case blank && tm.traits().textContent:
			d.Set("content", jinja.NewString(""))
		}
	}
}

// joinParts joins text parts; ok is false if there is a part of another kind.
func joinParts(parts []jinja.Value) (joined string, ok bool) {
	var texts []string
	for _, part := range parts {
		if part.IsDict() {
			part, _ = part.AsDict().Get("text")
		}
		if !part.IsString() {
			return "", false
		}
		texts = append(texts, part.AsString())
	}
	return strings.Join(texts, "\n"), true
}

// decodeArguments replaces the arguments of one call, if they are a string that holds an object.
func decodeArguments(call jinja.Value, m *marker) {
	if !call.IsDict() {
		return
	}
	if function, ok := call.AsDict().Get("function"); ok && function.IsDict() {
		call = function
	}
	arguments, ok := call.AsDict().Get("arguments")
	if !ok || !arguments.IsString() {
		return
	}
	if v, err := decodeValue(jsontext.Value(arguments.AsString()), m.again); err == nil && v.IsDict() {
		call.AsDict().Set("arguments", v)
	}
}
