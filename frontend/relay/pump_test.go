package relay

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// opened is a stream whose first event the client has; what comes behind it, a test's own code sends.
type opened struct {
	*relayed
	body   io.ReadCloser  // of the client's answer, behind the first event
	worker chan<- sendRaw // takes what the worker does next, once
}

type sendRaw func(c *net.TCPConn)

const firstEvent = "data: {\"first\":1}\n\n"

// openStream begins a stream. The worker's connection stays open until its code has run and the test has ended.
func openStream(t *testing.T, change func(*Config)) *opened {
	t.Helper()
	r := newRelay(t, "vllm", change)
	next := make(chan sendRaw, 1)
	r.decode.set(func() {
		r.decode.before = func(_ int, w http.ResponseWriter, _ *http.Request) bool {
			c, _, _ := http.NewResponseController(w).Hijack()
			t.Cleanup(func() { c.Close() })
			io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"+chunk(firstEvent))
			select {
			case send := <-next:
				send(c.(*net.TCPConn))
			case <-t.Context().Done():
			}
			return true
		}
	})
	res, err := http.Post(r.URL+completionsPath, "application/json", strings.NewReader(streamed))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { res.Body.Close() })
	got := make([]byte, len(firstEvent))
	if _, err := io.ReadFull(res.Body, got); err != nil || string(got) != firstEvent {
		t.Fatalf("%q, %v", got, err)
	}
	return &opened{relayed: r, body: res.Body, worker: next}
}

const lastEvent = "data: [DONE]\n\n"

func chunk(text string) string { return fmt.Sprintf("%x\r\n%s\r\n", len(text), text) }

// readAll reads until the end, which must come soon.
func (o *opened) readAll() (string, error) {
	o.t.Helper()
	type end struct {
		body []byte
		err  error
	}
	done := make(chan end, 1)
	go func() {
		b, err := io.ReadAll(o.body)
		done <- end{b, err}
	}()
	select {
	case e := <-done:
		return string(e.body), e.err
	case <-time.After(10 * time.Second):
		o.body.Close()
		o.t.Fatalf("no end; until now %q", (<-done).body)
		return "", nil
	}
}

func (o *opened) idle() {
	o.t.Helper()
	o.await(func() bool { return o.metric("worker_requests") == 0 && o.metric("requests_in_flight") == 0 })
}

// However a stream is cut into packets, the client gets its events, and the connection to the worker is kept if nothing is
// behind the end.
func TestStreamCutAnywhere(t *testing.T) {
	rest := strings.Replace(chunk("data: 2\n\n"), "\r", ";x=\"y\"\r", 1) + chunk(strings.Repeat("x", 300)) + chunk("\n\ndata: 3\n\n") + chunk("data: [DONE]\n\n") + "0\r\nTrailer: x\r\n\r\n"
	want := "data: 2\n\n" + strings.Repeat("x", 300) + "\n\ndata: 3\n\ndata: [DONE]\n\n"
	for name, c := range map[string]struct {
		size   int
		behind string
	}{
		"bytes": {1, ""}, "sevens": {7, ""}, "whole": {len(rest), ""}, "more behind": {len(rest) + 10, "HTTP/1.1 2"},
	} {
		t.Run(name, func(t *testing.T) {
			o := openStream(t, func(c *Config) { c.Timeouts.Idle = time.Minute })
			o.worker <- func(conn *net.TCPConn) {
				for b := []byte(rest + c.behind); len(b) > 0; {
					n := min(c.size, len(b))
					if _, err := conn.Write(b[:n]); err != nil {
						t.Error(err)
						return
					}
					b = b[n:]
				}
			}
			if got, err := o.readAll(); got != want || err != nil {
				t.Errorf("%q, %v", got, err)
			}
			o.idle()
			e := o.s.fleet.all()[1].endpoint
			e.mu.Lock()
			defer e.mu.Unlock()
			if kept := len(e.idle) == 1; kept != (c.behind == "") {
				t.Errorf("%d connections are kept", len(e.idle))
			}
		})
	}
}

// A stream that breaks ends at once for the client, who sees that it is not whole.
func TestStreamBreaks(t *testing.T) {
	write := func(text string) sendRaw {
		return func(c *net.TCPConn) { io.WriteString(c, text) }
	}
	closed := func(text string) sendRaw {
		return func(c *net.TCPConn) { io.WriteString(c, text); c.Close() }
	}
	reset := func(text string) sendRaw {
		return func(c *net.TCPConn) { io.WriteString(c, text); _ = c.SetLinger(0); c.Close() }
	}
	for name, c := range map[string]struct {
		send sendRaw
		code string // of the error event; "" for an answer that breaks off
	}{
		"end":                   {closed(""), "engine_lost"},
		"end behind an event":   {closed(chunk("data: 2\n\n")), "engine_lost"},
		"end in a chunk":        {closed("64\r\ndata: 2\n\n"), ""},
		"end in a chunk's head": {closed("6"), "engine_lost"},
		"end in the trailers":   {closed("0\r\nA: b\r\n"), "engine_lost"},
		"end in an event":       {closed(chunk("data: {")), ""},
		"no [DONE]":             {write(chunk("data: 2\n\n") + "0\r\n\r\n"), "engine_lost"},
		"[DONE] in the text":    {write(chunk(`data: {"x":"data: [DONE]"}`+"\n\n") + "0\r\n\r\n"), "engine_lost"},
		"no end of an event":    {write(chunk("data: {") + "0\r\n\r\n"), ""},
		"reset":                 {reset(""), "engine_lost"},
		"no length":             {write("data: 2\n\n"), "engine_lost"},
		"no CRLF":               {write("1\r\nxyz\r\n"), ""},
		"an endless head":       {write(strings.Repeat("1", maxLine+1)), "engine_lost"},
		"a huge chunk":          {write("fffffffffffffffffff\r\n"), "engine_lost"},
		"silence":               {write(chunk("data: 2\n\n")), "engine_timeout"},
	} {
		t.Run(name, func(t *testing.T) {
			o := openStream(t, func(c *Config) {
				if name == "silence" {
					c.Timeouts.Stream = 100 * time.Millisecond
				}
			})
			o.worker <- c.send
			got, err := o.readAll()
			switch {
			case c.code == "" && (err == nil || strings.Contains(got, "error")):
				t.Errorf("an answer that breaks off looks whole: %q", got)
			case c.code != "" && (err != nil || !strings.Contains(got, `"code":"`+c.code+`"`) || strings.HasSuffix(got, lastEvent)):
				t.Errorf("%q, %v", got, err)
			}
			o.idle()
		})
	}
}

// A stream may last longer than any of its pauses may.
func TestStreamOutlivesItsTimeout(t *testing.T) {
	o := openStream(t, func(c *Config) { c.Timeouts.Stream = 300 * time.Millisecond })
	o.worker <- func(c *net.TCPConn) {
		for range 10 {
			time.Sleep(60 * time.Millisecond)
			io.WriteString(c, chunk("data: x\n\n"))
		}
		io.WriteString(c, chunk("data: [DONE]\n\n")+"0\r\n\r\n")
	}
	if got, err := o.readAll(); got != strings.Repeat("data: x\n\n", 10)+"data: [DONE]\n\n" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
}

// A client that does not read holds the worker up, and nothing is lost once it reads; or it leaves, and the leg ends.
func TestClientHoldsWorkerUp(t *testing.T) {
	const piece, pieces = 16 << 10, 4096
	for _, leaves := range []bool{false, true} {
		o := openStream(t, nil)
		var sent atomic.Int64
		broken := make(chan error, 1)
		o.worker <- func(c *net.TCPConn) {
			for i := range pieces {
				if _, err := io.WriteString(c, chunk(fmt.Sprintf("%0*d", piece, i))); err != nil {
					broken <- err
					return
				}
				sent.Add(1)
			}
			_, err := io.WriteString(c, chunk("\n"+lastEvent)+"0\r\n\r\n")
			broken <- err
		}
		for before := int64(-1); ; time.Sleep(100 * time.Millisecond) {
			now := sent.Load()
			if now == pieces {
				t.Fatal("the worker has sent all that the client does not read")
			}
			if now == before {
				break
			}
			before = now
		}
		if leaves {
			o.body.Close()
			if err := <-broken; err == nil {
				t.Error("the worker's connection stays")
			}
			o.idle()
			continue
		}
		in := bufio.NewReaderSize(o.body, piece)
		b := make([]byte, piece)
		for i := range pieces {
			if _, err := io.ReadFull(in, b); err != nil || !bytes.Equal(b, fmt.Appendf(nil, "%0*d", piece, i)) {
				t.Fatalf("piece %d: %v, %.20q", i, err, b)
			}
		}
		if rest, err := io.ReadAll(in); string(rest) != "\n"+lastEvent || err != nil {
			t.Errorf("behind the last piece %q, %v", rest, err)
		}
		if err := <-broken; err != nil {
			t.Error(err)
		}
		o.idle()
	}
}

// A stream in which nothing comes ends with the client, with the relay, and with the client's connection.
func TestSilentStreamEnds(t *testing.T) {
	for name, end := range map[string]func(o *opened){
		"client": func(o *opened) { o.body.Close() },
		"relay":  func(o *opened) { o.s.cancel(errShuttingDown) },
		"server": func(o *opened) { o.Server.CloseClientConnections() },
	} {
		t.Run(name, func(t *testing.T) {
			o := openStream(t, nil)
			gone := make(chan error, 1)
			o.worker <- func(c *net.TCPConn) {
				_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
				_, err := c.Read(make([]byte, 1))
				gone <- err
			}
			end(o)
			if err := <-gone; !errors.Is(err, io.EOF) {
				t.Errorf("the worker sees %v", err)
			}
			if name == "relay" {
				if got, err := o.readAll(); err != nil || !strings.Contains(got, "shutting_down") {
					t.Errorf("%q, %v", got, err)
				}
			}
			o.idle()
		})
	}
}
