package main

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"
)

// Every file that the documents name exists.
func TestDocumentsNameRealFiles(t *testing.T) {
	root := filepath.Join("..", "..")
	pages, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	if err != nil || len(pages) == 0 {
		t.Fatalf("no pages under docs/: %v", err)
	}
	pages = append(pages, filepath.Join(root, "README.md"))
	named := regexp.MustCompile("`([a-z][a-z0-9_/-]*/[a-z0-9_-]+\\.(?:go|md|s|txt))`|\\]\\((docs/[^)#]+|[a-z]+\\.md)\\)")
	count := 0
	for _, page := range pages {
		raw, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range named.FindAllSubmatch(raw, -1) {
			path := filepath.Join(root, string(m[1]))
			if len(m[1]) == 0 {
				path = filepath.Join(filepath.Dir(page), string(m[2]))
			}
			if _, err := os.Stat(path); err != nil {
				t.Errorf("%s names %s%s: %v", filepath.Base(page), m[1], m[2], err)
			}
			count++
		}
	}
	if count < 30 {
		t.Errorf("only %d names found: the pattern has gone wrong", count)
	}
}
