package frontend

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
)

var (
	idPattern      = regexp.MustCompile(`"id":"(chatcmpl|cmpl)-[0-9a-f]{24}"`)
	createdPattern = regexp.MustCompile(`"created":[0-9]+`)
)

// TestShapes compares whole answers with testdata/shapes.txt; go test -rewrite writes them anew.
func TestShapes(t *testing.T) {
	s := newTestServer(t, newToyBackend(), nil)
	datadriven.RunTest(t, "testdata/shapes.txt", func(t *testing.T, d *datadriven.TestData) string {
		r := do(t, s.Handler(), strings.ToUpper(d.Cmd), d.CmdArgs[0].Key, d.Input)
		body := idPattern.ReplaceAllString(string(r.body), `"id":"$1-ID"`)
		body = createdPattern.ReplaceAllString(body, `"created":0`)
		body = strings.ReplaceAll(strings.TrimRight(body, "\n"), "\n\n", "\n")
		return fmt.Sprintf("%d %s\n%s\n", r.status, r.header.Get("Content-Type"), body)
	})
}
