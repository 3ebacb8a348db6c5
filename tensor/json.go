package tensor

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"reflect"
	"strconv"
	"strings"
)

// JSONProblem says what is wrong with a JSON document in the words of whoever wrote that, not of the program
// that reads it: which member (as a path, "rope_scaling/factor", "" for the document) and what is wrong with it
// ("is a string, expected an integer"). The error is one of a decoder's.
func JSONProblem(err error) (member, problem string) {
	if e, ok := errors.AsType[*json.SemanticError](err); ok {
		if member = strings.TrimPrefix(string(e.JSONPointer), "/"); len(member) > maxMember {
			member = member[:maxMember] + "…"
		}
		if e.Err != nil && !errors.Is(e.Err, strconv.ErrSyntax) && !errors.Is(e.Err, strconv.ErrRange) { // a reader of our own refused it
			return member, e.Err.Error()
		}
		return member, "is " + describeJSON(e) + ", expected " + expectedJSON(e.GoType)
	}
	return "", "is no valid JSON: " + strings.TrimPrefix(err.Error(), "jsontext: ") // which says where
}

// maxMember bounds the path of a member, in bytes.
const maxMember = 200

// describeJSON is the offending value if it is short, else its kind.
func describeJSON(e *json.SemanticError) string {
	if n := len(e.JSONValue); n > 0 && n <= 40 {
		return string(e.JSONValue)
	}
	switch e.JSONKind {
	case jsontext.KindString:
		return "a string"
	case jsontext.KindNumber:
		return "a number"
	case jsontext.KindBeginObject:
		return "an object"
	case jsontext.KindBeginArray:
		return "an array"
	case jsontext.KindTrue, jsontext.KindFalse:
		return "true or false"
	case jsontext.KindNull:
		return "null"
	}
	return "something else"
}

func expectedJSON(t reflect.Type) string {
	for t != nil && t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch {
	case t == nil:
		return "another type"
	case t.Kind() == reflect.Struct || t.Kind() == reflect.Map:
		return "an object"
	case t.Kind() == reflect.Slice || t.Kind() == reflect.Array:
		return "an array"
	case t.Kind() == reflect.String:
		return "a string"
	case t.Kind() == reflect.Bool:
		return "true or false"
	case t.Kind() == reflect.Float64 || t.Kind() == reflect.Float32:
		return "a number"
	case t.Kind() == reflect.Uint64:
		return "an integer from 0 on"
	}
	return "an integer"
}
