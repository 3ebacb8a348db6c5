package relay

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"
)

// testsOf are the test functions of a folder.
func testsOf(t *testing.T, folder string) (names []string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("..", "..", folder, "*_test.go"))
	if err != nil || len(files) == 0 {
		t.Errorf("%s has no tests: %v", folder, err)
	}
	for _, name := range files {
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			if d, ok := d.(*ast.FuncDecl); ok && d.Recv == nil {
				names = append(names, d.Name.Name)
			}
		}
	}
	return names
}

// TestBehavioursHaveTests: docs/behaviours.md has each number once, and the tests that it names exist.
func TestBehavioursHaveTests(t *testing.T) {
	raw, err := os.ReadFile("../../docs/behaviours.md")
	if err != nil {
		t.Fatal(err)
	}
	known := map[string][]string{}
	var numbers []string
	for _, row := range regexp.MustCompile(`(?m)^\| (\d+) \| .* \| (.*) \|$`).FindAllStringSubmatch(string(raw), -1) {
		numbers = append(numbers, row[1])
		tests := regexp.MustCompile("`([a-z/]+)\\.(Test\\w+)`").FindAllStringSubmatch(row[2], -1)
		if len(tests) == 0 {
			t.Errorf("%s has no tests", row[1])
		}
		for _, test := range tests {
			if known[test[1]] == nil {
				known[test[1]] = testsOf(t, test[1])
			}
			if !slices.Contains(known[test[1]], test[2]) {
				t.Errorf("%s: %s has no %s", row[1], test[1], test[2])
			}
		}
	}
	var want []string
	for n := 23; n <= 60; n++ {
		if n <= 52 || n >= 57 {
			want = append(want, string([]byte{byte('0' + n/10), byte('0' + n%10)}))
		}
	}
	if !slices.Equal(numbers, want) {
		t.Errorf("the numbers are %v", numbers)
	}
}
