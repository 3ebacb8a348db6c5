package wire

import (
	"os"
	"reflect"
	"strconv"
	"strings"
	"testing"
)

// docs/protocol.md lists every message with its number, name and fields.
func TestProtocolIsDocumented(t *testing.T) {
	page, err := os.ReadFile("../docs/protocol.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := map[string][]string{}
	for line := range strings.Lines(string(page)) {
		if cells := strings.Split(line, "|"); len(cells) == 7 {
			for i := range cells {
				cells[i] = strings.TrimSpace(cells[i])
			}
			rows[cells[1]] = cells
		}
	}
	for _, h := range headers() {
		row := rows[strconv.Itoa(int(h))]
		if row == nil {
			t.Errorf("%v (%d) is missing", h, h)
			continue
		}
		if row[2] != h.String() {
			t.Errorf("%d is called %s, want %s", h, row[2], h)
		}
		var fields []string
		for f := range reflect.TypeOf(newMessage(h)).Elem().Fields() {
			fields = append(fields, f.Name)
		}
		if got := strings.Join(fields, ", "); row[4] != got {
			t.Errorf("%v has fields %q, the page says %q", h, got, row[4])
		}
	}
}
