package frontend

import (
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
)

// APIKeys are the keys of which a client must show one. The zero value asks for none.
type APIKeys struct {
	// Only digests are kept: they have one length, so that comparing them takes one time.
	digests [][sha256.Size]byte
}

// maxKeyFile bounds a file of keys, in bytes.
const maxKeyFile = 1 << 20

// ReadAPIKeys reads a file with one key a line. What follows a # at the beginning of a line or after a
// space is a comment; empty lines are skipped. A file without a key is an error: it would let everybody in.
// Errors name the file and the line, never a key.
func ReadAPIKeys(path string) (APIKeys, error) {
	var keys APIKeys
	text, err := os.ReadFile(path)
	if err != nil {
		return keys, fmt.Errorf("API keys: %w", err)
	}
	fail := func(err error) (APIKeys, error) { return APIKeys{}, fmt.Errorf("API keys of %s: %w", path, err) }
	if len(text) > maxKeyFile {
		return fail(fmt.Errorf("%d bytes, more than %d: is this the right file?", len(text), maxKeyFile))
	}
	n := 0
	for line := range strings.Lines(string(text)) {
		n++
		key := line
		if i := strings.IndexByte(line, '#'); i == 0 || i > 0 && strings.IndexByte(" \t", line[i-1]) >= 0 {
			key = line[:i]
		}
		if key = strings.TrimSpace(key); key == "" {
			continue
		}
		if strings.ContainsFunc(key, func(r rune) bool { return r <= ' ' || r > '~' }) {
			return fail(fmt.Errorf("line %d: a key has no spaces, and ASCII characters only", n))
		}
		keys.Add(key)
	}
	if len(keys.digests) == 0 {
		return fail(errors.New("no key in it"))
	}
	return keys, nil
}

// Add makes one more key good.
func (k *APIKeys) Add(key string) { k.digests = append(k.digests, sha256.Sum256([]byte(key))) }

// Required reports whether clients need a key.
func (k APIKeys) Required() bool { return len(k.digests) > 0 }

// has compares with every key, in time that does not tell how near a guess is.
func (k APIKeys) has(key string) bool {
	digest, found := sha256.Sum256([]byte(key)), 0
	for i := range k.digests {
		found |= subtle.ConstantTimeCompare(k.digests[i][:], digest[:])
	}
	return found == 1
}

// Permit reports whether a request shows one of the keys, or needs none.
func (k APIKeys) Permit(r *http.Request) bool { return k.authorize(r) == nil }

// authorize checks the request's "Authorization: Bearer KEY".
func (k APIKeys) authorize(r *http.Request) error {
	if !k.Required() {
		return nil
	}
	scheme, key, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	key = strings.TrimSpace(key)
	switch {
	case !strings.EqualFold(scheme, "Bearer") || key == "":
		return &apiError{
			status: http.StatusUnauthorized, kind: typeInvalid, challenge: true,
			message: "this server needs an API key: send the header `Authorization: Bearer YOUR_KEY`",
		}
	case !k.has(key):
		return &apiError{
			status: http.StatusUnauthorized, kind: typeInvalid, code: "invalid_api_key", challenge: true,
			message: "the API key is not one of this server's",
		}
	}
	return nil
}
