package collective

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"time"

	"baton/mtls"
)

// A connection begins with both sides proving that they know the secret, without showing it. The dialer
// sends magic and a nonce; the other side answers with the same; the dialer sends what it is (hello) and a
// MAC of that and both nonces; the other side checks it and answers likewise (welcome). The dialer proves first, so
// that a stranger learns nothing to try secrets on.
const (
	magic     = "baton-collective 1\n"
	nonceSize = 32

	maxIntroduction  = 1 << 20 // bytes of a hello or welcome
	handshakeTimeout = 5 * time.Second
)

// hello is a process that wants to be in a world.
type hello struct {
	Size    int    // of the world
	Ranks   []int  // that it runs, ascending
	Addr    string // where others reach it; "" host for the one that the connection comes from
	Session string // of the world, once known
}

// welcome is the answer to a hello. To one without Session it tells about everybody.
type welcome struct {
	Refusal   string // why not, in words
	Again     bool   // it may be different later, or elsewhere
	Session   string
	Silence   time.Duration
	Processes []processAddr // by lowest rank
}

type processAddr struct {
	Ranks []int
	Addr  string
}

// SecretError is a process that has another secret.
type SecretError struct{ Peer string }

func (e *SecretError) Error() string {
	return fmt.Sprintf("%s has another secret: all processes of a shard need the same", e.Peer)
}

// RefusedError is a process that does not want this one in its world.
type RefusedError struct {
	Peer, Reason string
	again        bool
}

func (e *RefusedError) Error() string { return fmt.Sprintf("%s refuses: %s", e.Peer, e.Reason) }

// greeting is one side of a handshake.
type greeting struct {
	conn          net.Conn
	secret        []byte
	dialer, other []byte // nonces
}

func (g *greeting) mac(label string, body []byte) []byte {
	h := hmac.New(sha256.New, g.secret)
	for _, b := range [][]byte{[]byte(magic), []byte(label), g.dialer, g.other, body} {
		_ = binary.Write(h, binary.LittleEndian, uint64(len(b)))
		h.Write(b)
	}
	return h.Sum(nil)
}

// send writes v as JSON after its length and its MAC.
func (g *greeting) send(label string, v any) error {
	body, err := json.Marshal(v)
	if err != nil {
		return err
	}
	b := binary.LittleEndian.AppendUint32(nil, uint32(len(body)))
	b = append(append(b, g.mac(label, body)...), body...)
	_, err = g.conn.Write(b)
	return err
}

// receive reads what send wrote.
func (g *greeting) receive(label string, v any) error {
	head := make([]byte, 4+sha256.Size)
	if _, err := io.ReadFull(g.conn, head); err != nil {
		return err
	}
	n := binary.LittleEndian.Uint32(head)
	if n > maxIntroduction {
		return fmt.Errorf("it introduces itself with %d bytes; %d are the limit", n, maxIntroduction)
	}
	body := make([]byte, n)
	if _, err := io.ReadFull(g.conn, body); err != nil {
		return err
	}
	if !hmac.Equal(head[4:], g.mac(label, body)) {
		return &SecretError{g.conn.RemoteAddr().String()}
	}
	return json.Unmarshal(body, v)
}

// open exchanges nonces.
func (g *greeting) open(dials bool) error {
	mine := make([]byte, nonceSize)
	rand.Read(mine)
	theirs := make([]byte, len(magic)+nonceSize)
	write := func() error {
		_, err := g.conn.Write(append([]byte(magic), mine...))
		return err
	}
	if dials {
		if err := write(); err != nil {
			return err
		}
	}
	if _, err := io.ReadFull(g.conn, theirs); err != nil {
		if dials && (err == io.EOF || errors.Is(err, io.ErrUnexpectedEOF)) {
			return errors.New("it ended the connection without a word: it may want TLS, or be something else than meant")
		}
		return err
	}
	if string(theirs[:len(magic)]) != magic {
		return fmt.Errorf("it begins with %q where %q is due: it speaks another protocol, another version, or TLS", theirs[:len(magic)], magic)
	}
	theirs = theirs[len(magic):]
	g.dialer, g.other = mine, theirs
	if !dials {
		g.dialer, g.other = theirs, mine
		return write()
	}
	return nil
}

// dial connects, proves itself and sends h. The answer is still to come.
func dial(ctx context.Context, addr string, cfg *MeshConfig, h hello) (*greeting, error) {
	ctx, cancel := context.WithTimeout(ctx, handshakeTimeout)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	if cfg.TLS != nil {
		secure, err := mtls.Client(ctx, conn, cfg.TLS.Client(), addr)
		if err != nil {
			return nil, err
		}
		conn = secure
	}
	g := &greeting{conn: conn, secret: cfg.Secret}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	err = g.open(true)
	if err == nil {
		err = g.send("hello", h)
	}
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("%s: %w", addr, err)
	}
	return g, nil
}

// answer waits for the welcome, as long as ctx allows.
func (g *greeting) answer(ctx context.Context, addr string) (welcome, error) {
	stop := context.AfterFunc(ctx, func() { g.conn.Close() })
	var w welcome
	err := g.receive("welcome", &w)
	if !stop() {
		err = context.Cause(ctx)
	}
	if err != nil {
		return w, fmt.Errorf("%s: %w", addr, err)
	}
	if w.Refusal != "" {
		return w, &RefusedError{addr, w.Refusal, w.Again}
	}
	return w, nil
}

// accept does the other side's part until there is a hello.
func accept(ctx context.Context, conn net.Conn, cfg *MeshConfig) (*greeting, hello, error) {
	ctx, cancel := context.WithTimeout(ctx, handshakeTimeout)
	defer cancel()
	var h hello
	if cfg.TLS != nil {
		secure, err := mtls.Server(ctx, conn, cfg.TLS.Server())
		if err != nil {
			return nil, h, err
		}
		conn = secure
	}
	g := &greeting{conn: conn, secret: cfg.Secret}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	err := g.open(false)
	if err == nil {
		err = g.hear(&h, cfg.Size)
	}
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		conn.Close()
		return nil, h, fmt.Errorf("%s: %w", conn.RemoteAddr(), err)
	}
	return g, h, nil
}

// hear receives a hello and answers one that is no good, for the people at the other end.
func (g *greeting) hear(h *hello, size int) error {
	err := g.receive("hello", h)
	var secret *SecretError
	if errors.As(err, &secret) {
		// A MAC would let a stranger try secrets on it. That this one is wrong says enough.
		_, _ = g.conn.Write(make([]byte, 4+sha256.Size))
	} else if err == nil {
		if err = h.check(size); err != nil {
			_ = g.send("welcome", welcome{Refusal: err.Error()})
		}
	}
	return err
}

func (h *hello) check(size int) error {
	if h.Size != size {
		return fmt.Errorf("it is for a shard of %d ranks, this is one of %d", h.Size, size)
	}
	return checkRanks(h.Ranks, size)
}

// checkRanks wants an ascending list.
func checkRanks(ranks []int, size int) error {
	if len(ranks) == 0 || !slices.IsSorted(ranks) || len(slices.Compact(slices.Clone(ranks))) != len(ranks) || ranks[0] < 0 || ranks[len(ranks)-1] >= size {
		return fmt.Errorf("%v is not a list of different ranks from 0 to %d, ascending", ranks, size-1)
	}
	return nil
}
