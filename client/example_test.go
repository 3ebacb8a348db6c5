package client_test

import (
	"fmt"
	"net/http"
	"strings"

	"baton/client"
)

// Two replicas with two frontends each: every turn of a session is posted to one URL, and carries the id that
// the frontend and the engines choose by.
func Example() {
	frontends, err := client.NewSessions([]string{
		"http://node0:8300", "http://node0:8301", // replica 0
		"http://node1:8302", "http://node1:8303", // replica 1
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, session := range []string{"session-1", "session-2", "session-1"} {
		body := strings.NewReader(`{"messages":[{"role":"user","content":"Hello"}]}`)
		r, err := http.NewRequest(http.MethodPost, frontends.URL(session)+"/v1/chat/completions", body)
		if err != nil {
			fmt.Println(err)
			return
		}
		r.Header.Set("X-Session-Id", session)
		fmt.Println(session, r.URL.Host)
	}
	// Output:
	// session-1 node0:8300
	// session-2 node0:8301
	// session-1 node0:8300
}
