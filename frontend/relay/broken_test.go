package relay

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
)

// A client whose body does not come, or is no HTTP, is not told that all went well: it may still listen.
func TestBrokenBodiesAreNoSuccess(t *testing.T) {
	t.Parallel()
	r := newRelay(t, "trtllm", nil)
	for name, c := range map[string]struct {
		request string
		status  int // 0 for a connection that breaks off: the client seems to have left
	}{
		"half closed":     {"POST " + completionsPath + " HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{", 0},
		"passed on":       {"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{", 0},
		"bad chunks":      {"POST " + completionsPath + " HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", 400},
		"a cut chunk":     {"POST " + completionsPath + " HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n20\r\n{", 0},
		"whole, then cut": {rawPost("1.1", simple), 0},
	} {
		conn := r.dialRaw(c.request)
		_ = conn.(*net.TCPConn).CloseWrite()
		res, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if c.status == 0 {
			if err == nil && res.StatusCode == 200 {
				if body, err := io.ReadAll(res.Body); err == nil && !strings.Contains(string(body), "choices") {
					t.Errorf("%s: an answer of 200 with %q", name, body)
				}
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		body, err := io.ReadAll(res.Body)
		if err != nil || res.StatusCode != c.status || !strings.Contains(string(body), "the body cannot be read") {
			t.Errorf("%s: %d %q, %v", name, res.StatusCode, body, err)
		}
	}
	r.await(func() bool { return r.metric("requests_in_flight") == 0 && r.metric("worker_requests") == 0 })
}

// Wrong methods are answered as engines do.
func TestWrongMethods(t *testing.T) {
	t.Parallel()
	r := newRelay(t, "trtllm", nil)
	for path, want := range map[string]string{
		chatPath: "POST", completionsPath: "POST", "/tokenize": "POST", "/v1/models": "GET", "/health": "GET", "/workers": "GET, POST, DELETE", "/nothing": "",
	} {
		req, _ := http.NewRequest("PUT", r.URL+path, strings.NewReader(simple))
		got := r.do(req)
		status := http.StatusMethodNotAllowed
		if want == "" {
			status = http.StatusNotFound
		}
		if got.status != status || got.header.Get("Allow") != want || !strings.Contains(got.body, `"error"`) || !strings.Contains(got.body, "PUT") {
			t.Errorf("%s: %+v", path, got)
		}
	}
}

// A client that asks before it sends a body that is too large, or without a key, is told so at once, not to go on.
func TestRefusedBeforeTheBody(t *testing.T) {
	t.Parallel()
	r := newRelay(t, "trtllm", func(c *Config) {
		c.Limits.MaxBody = 1000
		c.Authorize = func(r *http.Request) bool { return r.Header.Get("Authorization") != "" }
	})
	for want, c := range map[int]struct {
		length int
		header string
	}{413: {1001, "Authorization: x\r\n"}, 401: {10, ""}, 100: {1000, "Authorization: x\r\n"}} {
		for _, path := range []string{completionsPath, "/tokenize"} {
			conn := r.dialRaw(fmt.Sprintf("POST %s HTTP/1.1\r\nHost: x\r\n%sExpect: 100-continue\r\nContent-Length: %d\r\n\r\n", path, c.header, c.length))
			line, err := bufio.NewReader(conn).ReadString('\n')
			if err != nil || !strings.HasPrefix(line, fmt.Sprintf("HTTP/1.1 %d ", want)) {
				t.Errorf("%s with %d bytes: %q, %v", path, c.length, line, err)
			}
		}
	}
}
