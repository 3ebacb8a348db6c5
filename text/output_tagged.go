package text

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"slices"
	"strings"
)

// parameterTypes are the JSON types that a request's tools declare: [function][parameter].
type parameterTypes map[string]map[string][]string

// readParameterTypes reads the tools of a request; any is false if there is none. What is not as expected declares
// nothing: it is the template's to judge.
func readParameterTypes(tools []byte) (types parameterTypes, any bool) {
	type function struct {
		Name       string `json:"name"`
		Parameters struct {
			Properties map[string]jsontext.Value `json:"properties"`
		} `json:"parameters"`
	}
	var list []jsontext.Value
	if len(tools) == 0 || json.Unmarshal(tools, &list, looseJSON) != nil || len(list) == 0 {
		return nil, false
	}
	types = parameterTypes{}
	for _, raw := range list {
		var tool struct {
			Function function `json:"function"`
		}
		if json.Unmarshal(raw, &tool, looseJSON) != nil {
			continue
		}
		f := tool.Function
		if f.Name == "" && json.Unmarshal(raw, &f, looseJSON) != nil {
			continue
		}
		types[f.Name] = map[string][]string{}
		for parameter, schema := range f.Parameters.Properties {
			types[f.Name][parameter] = schemaTypes(schema)
		}
	}
	return types, true
}

// schemaTypes collects what a JSON schema says a value may be.
func schemaTypes(raw jsontext.Value) []string {
	var s struct {
		Type  jsontext.Value   `json:"type"`
		AnyOf []jsontext.Value `json:"anyOf"`
		OneOf []jsontext.Value `json:"oneOf"`
	}
	if json.Unmarshal(raw, &s, looseJSON) != nil {
		return nil
	}
	var types []string
	if one, ok := jsonText(s.Type); ok {
		types = append(types, one)
	} else {
		_ = json.Unmarshal(s.Type, &types) // of another form: no type
	}
	for _, option := range slices.Concat(s.AnyOf, s.OneOf) {
		types = append(types, schemaTypes(option)...)
	}
	return types
}

// taggedCall reads the parameters of a call without JSON: <parameter=name> value </parameter>, where one line break at
// either end of the value belongs to the tags.
func taggedCall(captured []string, types parameterTypes) []ToolCall {
	function, body := captured[0], captured[1]
	return readParameters(function, body, "<parameter=", "</parameter>", func(head, value string) (string, []byte) {
		value = strings.TrimSuffix(strings.TrimPrefix(value, "\n"), "\n")
		return head, appendTyped(nil, value, types[function][head])
	})
}

// dsmlShape is a call of DeepSeek's markup language, with its section's opening tag.
func dsmlShape(section, gapInTag string) shape {
	open, end := "<"+dsml+gapInTag, "</"+dsml+gapInTag
	return shape{
		parts: []part{opt(section), gap, lit(open + `invoke name="`), name, lit(`">`), until(end + "invoke>")},
		calls: func(captured []string, _ parameterTypes) []ToolCall {
			return readParameters(captured[0], captured[1], open+`parameter name="`, end+"parameter>", dsmlValue)
		},
	}
}

// dsmlValue reads a parameter whose tag says whether its value is a string or JSON.
func dsmlValue(head, value string) (string, []byte) {
	if name, ok := strings.CutSuffix(head, `" string="false"`); ok && jsontext.Value(value).IsValid(looseJSON) {
		return name, []byte(strings.TrimSpace(value))
	}
	quoted, _ := jsontext.AppendQuote(nil, value)
	name, _, _ := strings.Cut(head, `"`)
	return name, quoted
}

// readParameters makes a call of parameters, each open + head + ">" + value + end with white space between; read gives
// a parameter's name and its value as JSON.
func readParameters(function, body, open, end string, read func(head, value string) (string, []byte)) []ToolCall {
	arguments := []byte{'{'}
	for {
		body = strings.TrimLeft(body, whiteSpace)
		if body == "" {
			return []ToolCall{{Name: function, Arguments: string(append(arguments, '}'))}}
		}
		rest, ok := strings.CutPrefix(body, open)
		head, rest, named := strings.Cut(rest, ">")
		value, after, closed := strings.Cut(rest, end)
		if !ok || !named || !closed {
			return nil
		}
		parameter, raw := read(head, value)
		if parameter == "" {
			return nil
		}
		if len(arguments) > 1 {
			arguments = append(arguments, ", "...)
		}
		arguments, _ = jsontext.AppendQuote(arguments, parameter)
		arguments = append(append(arguments, ": "...), raw...)
		body = after
	}
}

// appendTyped appends a value as JSON of the first declared type that it fits, otherwise as a string. Templates print
// numbers and JSON as they are, but true, false and null often as Python does.
func appendTyped(b []byte, value string, types []string) []byte {
	if slices.Contains(types, "string") && !slices.Contains(types, "null") {
		b, _ = jsontext.AppendQuote(b, value)
		return b
	}
	plain := strings.TrimSpace(value)
	if python, ok := map[string]string{"True": "true", "False": "false", "None": "null"}[plain]; ok {
		plain = python
	}
	kind := jsontext.Value(plain).Kind()
	fits := map[jsontext.Kind][]string{
		'n': {"null", "boolean", "integer", "number", "object", "array"},
		't': {"boolean"}, 'f': {"boolean"}, '0': {"integer", "number"}, '{': {"object"}, '[': {"array"},
	}[kind]
	for _, t := range fits {
		if slices.Contains(types, t) && jsontext.Value(plain).IsValid(looseJSON) {
			return append(b, plain...)
		}
	}
	b, _ = jsontext.AppendQuote(b, value)
	return b
}
