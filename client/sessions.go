// Package client is for programs that call a fleet of frontends: it picks a frontend's URL for each session.
//
// # The rule
//
// A session that is new goes to the URL whose index is the first eight bytes of the SHA-256 of the
// session's id, read as a big-endian number, modulo the number of URLs. Every process that has the same list
// in the same order picks the same URL, with no state shared and nothing asked. A session that is known
// stays where it is for as long as its URL is in the list, also when the list changes.
//
// # With N replicas of F frontends
//
// A fleet of N replicas (each with its own prefill and decode engines) and F frontends a replica has N × F
// URLs; frontend f of replica r is number r·F + f. Three choices follow each other, and each narrows the one before:
//
//  1. here: the session's hash picks a URL, and with it a replica, as the replicas' engines are disjoint;
//  2. in the frontend: the session id, sent along as the header X-Session-Id or as the body's
//     conversation_params.conversation_id, picks the engines that already hold the conversation's prefix;
//  3. in an engine with several data-parallel groups: the same id picks the group.
//
// So one conversation meets one KV cache, and adding frontends costs no hits: the F frontends of a replica
// share engines and each sees every turn of its own sessions. What this buys is speed, not correctness: a
// session that moves (a URL that left, a client that restarted with another list) computes its prefix once more
// and goes on. The hash spreads sessions evenly only when there are many of them a URL; it does not look at load.
package client

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
)

// Index is the rule for a new session: which of n URLs it goes to. n must be positive.
func Index(session string, n int) int {
	sum := sha256.Sum256([]byte(session))
	return int(binary.BigEndian.Uint64(sum[:8]) % uint64(n))
}

// maxSessions bounds what is remembered. The sessions that were used least recently are forgotten first, and
// come back to the same URL unless the list has changed in the meantime.
const maxSessions = 1 << 20

// Sessions remembers where sessions go. It is safe for concurrent use.
type Sessions struct {
	mu    sync.Mutex
	urls  []string
	limit int // entries a generation

	// Sessions used since the last turn of generations, and those used before it only.
	young, old map[string]string
}

// NewSessions makes a Sessions for frontends at urls, in the order that all clients agree on.
func NewSessions(urls []string) (*Sessions, error) {
	s := &Sessions{limit: maxSessions / 2, young: map[string]string{}}
	return s, s.SetURLs(urls)
}

// ErrNoURLs is returned for a list without a URL.
var ErrNoURLs = errors.New("client: the list of frontends is empty: name at least one URL")

// SetURLs replaces the list. Sessions whose URL is still in it stay; the others are picked anew when they
// are next asked for. An empty list, an empty URL and one that is listed twice are refused, and change nothing.
func (s *Sessions) SetURLs(urls []string) error {
	if len(urls) == 0 {
		return ErrNoURLs
	}
	for i, url := range urls {
		if first := slices.Index(urls, url); url == "" || first < i {
			return fmt.Errorf("client: URL %d of the frontends is %q, which is empty or also URL %d: list every frontend once", i, url, first)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.urls = slices.Clone(urls)
	for _, generation := range []map[string]string{s.young, s.old} {
		for session, url := range generation {
			if !slices.Contains(s.urls, url) {
				delete(generation, session)
			}
		}
	}
	return nil
}

// URL is the session's frontend. The first call for a session pins it.
func (s *Sessions) URL(session string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if url, ok := s.young[session]; ok {
		return url
	}
	url, ok := s.old[session]
	if !ok {
		url = s.urls[Index(session, len(s.urls))]
	}
	if len(s.young) >= s.limit {
		s.old, s.young = s.young, map[string]string{}
	}
	s.young[session] = url
	return url
}

// Forget drops a session that has ended.
func (s *Sessions) Forget(session string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.young, session)
	delete(s.old, session)
}
