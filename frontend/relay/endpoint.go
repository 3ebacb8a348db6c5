package relay

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// endpoint is a worker's HTTP/1.1 address with the connections to it. The standard client has two goroutines a
// connection and hands every answer over between them; here a request's own goroutine writes and reads.
type endpoint struct {
	addr   string // host:port to dial
	host   string // of the Host header
	prefix string // of paths, without / at the end
	tls    *tls.Config

	connectTimeout time.Duration
	idleTimeout    time.Duration // a connection unused for longer is not used again

	mu     sync.Mutex
	idle   []*conn // the most recently used last
	closed bool
}

// Limits of what an engine may send outside bodies.
const (
	maxHead = 64 << 10
	maxIdle = 1024 // connections kept
)

// parseBase reads a worker's base URL.
func parseBase(raw string) (*url.URL, error) {
	u, err := url.Parse(raw)
	switch {
	case err != nil:
		return nil, fmt.Errorf("worker URL %q: %w", raw, err)
	case u.Scheme != "http" && u.Scheme != "https", u.Hostname() == "":
		return nil, fmt.Errorf("worker URL %q: write it as http://HOST:PORT or https://HOST:PORT", raw)
	case u.User != nil || u.RawQuery != "":
		return nil, fmt.Errorf("worker URL %q: a base URL has neither user nor query", raw)
	}
	return u, nil
}

func newEndpoint(u *url.URL, trust *tls.Config, connectTimeout, idleTimeout time.Duration) *endpoint {
	e := &endpoint{host: u.Host, prefix: strings.TrimRight(u.EscapedPath(), "/"), connectTimeout: connectTimeout, idleTimeout: idleTimeout}
	port := u.Port()
	switch {
	case port != "":
	case u.Scheme == "https":
		port = "443"
	default:
		port = "80"
	}
	e.addr = net.JoinHostPort(u.Hostname(), port)
	if u.Scheme == "https" {
		e.tls = &tls.Config{}
		if trust != nil {
			e.tls = trust.Clone()
		}
		e.tls.ServerName = u.Hostname()
		e.tls.NextProtos = []string{"http/1.1"}
	}
	return e
}

// answer is what an engine sent: the head, and the body to be read. It must be closed.
type answer struct {
	status  int
	header  http.Header
	length  int64 // of the body; -1 when it is not known
	body    io.Reader
	chunked bool // body reads chunks from conn
	seen    int  // bytes of the raw body in the buffer that were looked at
	conn    *conn
	e       *endpoint
	stop    func() bool
	held    *holding
	done    bool // the body was read to its end
	lost    bool // the connection cannot be used again
}

// call is a request to an engine.
type call struct {
	method string
	path   string
	header []string // "Name: value" each
	body   pieces
	sent   func() // called once it is sent, unless nil
}

// Kinds of failure that leave the engine's answer unknown.
var (
	errDial    = errors.New("cannot connect")
	errReset   = errors.New("the connection broke")
	errStale   = errors.New("the connection was closed while it was idle")
	errTimeout = errors.New("no answer in time")
	errAnswer  = errors.New("the answer is not HTTP/1.1")
)

// callError says how a call failed.
type callError struct {
	kind error // one of the above
	err  error
}

func (e *callError) Error() string       { return e.kind.Error() + ": " + e.err.Error() }
func (e *callError) Unwrap() []error     { return []error{e.kind, e.err} }
func failed(kind error, err error) error { return &callError{kind, err} }

// do sends a request and reads the head of the answer. When ctx ends, the connection is closed, also while the body
// is read. timeout bounds the wait for the head.
func (e *endpoint) do(ctx context.Context, c *call, timeout time.Duration) (*answer, error) {
	conn, err := e.get(ctx)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	a, err := e.exchange(conn, c, timeout)
	if err == nil {
		a.e, a.conn, a.stop = e, conn, stop
		return a, nil
	}
	stop()
	conn.Close()
	switch {
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case conn.reused && errors.Is(err, errReset):
		e.flush() // the engine has restarted, or closes what is idle sooner than we do
		return nil, failed(errStale, err)
	}
	return nil, err
}

func (e *endpoint) exchange(conn *conn, c *call, timeout time.Duration) (*answer, error) {
	conn.limit = time.Now().Add(timeout)
	if err := conn.SetWriteDeadline(conn.limit); err != nil {
		return nil, failed(errReset, err)
	}
	head := make([]byte, 0, 512)
	head = append(head, c.method...)
	head = append(append(append(head, ' '), e.prefix...), c.path...)
	head = append(append(head, " HTTP/1.1\r\nHost: "...), e.host...)
	for _, h := range c.header {
		head = append(append(head, "\r\n"...), h...)
	}
	if c.body != nil {
		head = append(head, "\r\nContent-Type: application/json\r\nContent-Length: "...)
		head = strconv.AppendInt(head, int64(c.body.size()), 10)
	}
	head = append(head, "\r\n\r\n"...)
	out := append(net.Buffers{head}, c.body...)
	_, sent := out.WriteTo(conn.Conn) // an engine that refuses a body may stop reading it: first see what it says
	if sent == nil && c.sent != nil {
		c.sent()
	}
	conn.budget = maxHead
	res, err := readHead(conn.br)
	switch {
	case err == nil:
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, failed(errTimeout, fmt.Errorf("after %v", timeout))
	case sent != nil:
		return nil, failed(errReset, sent)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, net.ErrClosed):
		return nil, failed(errReset, err)
	default:
		return nil, failed(errAnswer, err)
	}
	if res.StatusCode == http.StatusSwitchingProtocols {
		return nil, failed(errAnswer, errors.New("it goes on in another protocol"))
	}
	conn.budget = unbounded
	return &answer{
		status: res.StatusCode, header: res.Header, length: res.ContentLength, body: res.Body,
		chunked: len(res.TransferEncoding) == 1 && res.TransferEncoding[0] == "chunked",
		lost:    res.Close || sent != nil,
		done:    res.ContentLength == 0,
	}, nil
}

var postRequest = &http.Request{Method: http.MethodPost}

// readHead skips interim answers.
func readHead(br *bufio.Reader) (*http.Response, error) {
	for {
		res, err := http.ReadResponse(br, postRequest)
		if err != nil || res.StatusCode >= 200 || res.StatusCode == http.StatusSwitchingProtocols {
			return res, err
		}
	}
}

// Read reads the body.
func (a *answer) Read(p []byte) (int, error) {
	n, err := a.body.Read(p)
	if err == io.EOF {
		a.done = true
	}
	return n, err
}

// next is what is there of the raw body beyond what was taken, and more than it was at the last call.
func (a *answer) next() ([]byte, error) {
	n := a.conn.br.Buffered()
	if n == a.seen {
		n++
	}
	if _, err := a.conn.br.Peek(n); err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return nil, err
	}
	a.seen = a.conn.br.Buffered()
	return a.conn.br.Peek(a.seen)
}

// take passes bytes of the raw body.
func (a *answer) take(n int) {
	_, _ = a.conn.br.Discard(n) // they are in the buffer
	a.seen -= n
}

// within gives the next reads until now plus d.
func (a *answer) within(d time.Duration) { a.conn.limit = time.Now().Add(d) }

// readAll reads the body, of at most limit bytes, into buf's memory if that suffices.
func (a *answer) readAll(buf []byte, limit int64) ([]byte, error) {
	if a.length > limit {
		return nil, &tooLargeError{limit}
	}
	if n := int(min(a.length, maxTrusted)) + 1; n > cap(buf) {
		buf = make([]byte, 0, n)
	}
	buf = buf[:0]
	for {
		if len(buf) == cap(buf) {
			buf = append(buf, 0)[:len(buf)]
		}
		n, err := a.Read(buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		if err := a.held.take(n); err != nil {
			return nil, err
		}
		switch {
		case int64(len(buf)) > limit:
			return nil, &tooLargeError{limit}
		case err == io.EOF:
			return buf, nil
		case errors.Is(err, os.ErrDeadlineExceeded):
			return nil, failed(errTimeout, err)
		case err != nil:
			return nil, failed(errReset, err)
		}
	}
}

// maxTrusted is how much memory an announced length is given before the bytes have come.
const maxTrusted = 1 << 20

// tooLargeError is an answer beyond a limit.
type tooLargeError struct{ limit int64 }

func (e *tooLargeError) Error() string {
	return fmt.Sprintf("the answer is larger than %d bytes (--max-answer)", e.limit)
}

// fetch sends a small request and returns what is answered, of at most limit bytes, with its status.
func (e *endpoint) fetch(ctx context.Context, c *call, timeout time.Duration, limit int64) (body []byte, status int, err error) {
	var a *answer
	for {
		if a, err = e.do(ctx, c, timeout); !errors.Is(err, errStale) {
			break
		}
	}
	if err != nil {
		return nil, 0, err
	}
	defer a.close()
	body, err = a.readAll(nil, limit)
	return body, a.status, err
}

// close gives the connection back if nothing is left on it, otherwise it closes it.
func (a *answer) close() {
	if alive := a.stop(); !alive || !a.done || a.lost || a.conn.br.Buffered() > 0 {
		a.conn.Close()
		return
	}
	a.e.put(a.conn)
}

// get is an idle connection or a new one.
func (e *endpoint) get(ctx context.Context) (*conn, error) {
	now := time.Now()
	for {
		e.mu.Lock()
		n := len(e.idle) - 1
		if n < 0 {
			e.mu.Unlock()
			break
		}
		c := e.idle[n]
		e.idle[n] = nil
		e.idle = e.idle[:n]
		e.mu.Unlock()
		if now.Sub(c.used) < e.idleTimeout && quiet(c.Conn) {
			c.reused = true
			return c, nil
		}
		c.Close()
	}
	return e.dial(ctx)
}

func (e *endpoint) dial(ctx context.Context) (*conn, error) {
	ctx, cancel := context.WithTimeout(ctx, e.connectTimeout)
	defer cancel()
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", e.addr)
	if err != nil {
		return nil, failed(errDial, err)
	}
	if e.tls != nil {
		t := tls.Client(c, e.tls)
		if err := t.HandshakeContext(ctx); err != nil {
			c.Close()
			return nil, failed(errDial, err)
		}
		c = t
	}
	return newConn(c), nil
}

func (e *endpoint) put(c *conn) {
	c.used = time.Now()
	e.mu.Lock()
	keep := !e.closed && len(e.idle) < maxIdle
	if keep {
		e.idle = append(e.idle, c)
	}
	e.mu.Unlock()
	if !keep {
		c.Close()
	}
}

// expire closes connections that have been idle for too long.
func (e *endpoint) expire(now time.Time) {
	e.mu.Lock()
	n := 0
	for n < len(e.idle) && now.Sub(e.idle[n].used) >= e.idleTimeout {
		n++
	}
	old := e.idle[:n:n]
	e.idle = append([]*conn(nil), e.idle[n:]...)
	e.mu.Unlock()
	for _, c := range old {
		c.Close()
	}
}

// flush closes all idle connections.
func (e *endpoint) flush() {
	e.mu.Lock()
	old := e.idle
	e.idle = nil
	e.mu.Unlock()
	for _, c := range old {
		c.Close()
	}
}

// close closes idle connections, and those in use once they are given back.
func (e *endpoint) close() {
	e.mu.Lock()
	e.closed = true
	e.mu.Unlock()
	e.flush()
}
