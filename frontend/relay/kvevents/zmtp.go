package kvevents

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"strings"
	"time"
)

// socket is the client's end of a ZeroMQ connection: ZMTP 3.0 (rfc.zeromq.org/spec/23) without security, over TCP.
type socket struct {
	c  net.Conn
	br *bufio.Reader
}

// Limits on peers.
const (
	maxMessage = 64 << 20 // bytes of one message
	maxFrames  = 16       // of one message
	handshake  = 5 * time.Second
)

// Flags of a frame.
const (
	flagMore    = 1
	flagLong    = 2
	flagCommand = 4
)

// dialZMTP connects to tcp://HOST:PORT as a socket of the given type.
func dialZMTP(ctx context.Context, address, kind string) (*socket, error) {
	host, err := hostPort(address)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, handshake)
	defer cancel()
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", host)
	if err != nil {
		return nil, err
	}
	s := &socket{c: c, br: bufio.NewReader(c)}
	stop := context.AfterFunc(ctx, func() { c.Close() })
	err = s.greet(kind)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("ZeroMQ handshake with %s: %w", address, err)
	}
	return s, nil
}

// hostPort is the host and port of tcp://HOST:PORT.
func hostPort(address string) (string, error) {
	u, err := url.Parse(address)
	if err != nil || u.Scheme != "tcp" || u.Hostname() == "" || u.Port() == "" || u.Path != "" {
		return "", fmt.Errorf("event address %q: write it as tcp://HOST:PORT", address)
	}
	return u.Host, nil
}

func (s *socket) greet(kind string) error {
	greeting := make([]byte, 64)
	greeting[0], greeting[9], greeting[10] = 0xff, 0x7f, 3
	copy(greeting[12:], "NULL")
	if _, err := s.c.Write(greeting); err != nil {
		return err
	}
	theirs := make([]byte, 64)
	if _, err := io.ReadFull(s.br, theirs); err != nil {
		return err
	}
	if theirs[0] != 0xff || theirs[9] != 0x7f || theirs[10] < 3 {
		return errors.New("the peer does not speak ZMTP 3")
	}
	if mechanism := strings.TrimRight(string(theirs[12:32]), "\x00"); mechanism != "NULL" {
		return fmt.Errorf("the peer wants the security mechanism %q, which is not supported", mechanism)
	}
	ready := append([]byte{5}, "READY"...)
	ready = property(ready, "Socket-Type", kind)
	if kind != "SUB" {
		ready = property(ready, "Identity", "")
	}
	if err := s.writeFrame(flagCommand, ready); err != nil {
		return err
	}
	flags, body, err := s.readFrame(4096)
	switch {
	case err != nil:
		return err
	case flags&flagCommand == 0:
		return errors.New("the peer skips the handshake")
	case strings.HasPrefix(string(body), "\x05ERROR"):
		return fmt.Errorf("the peer refuses: %q", body[6:])
	case !strings.HasPrefix(string(body), "\x05READY"):
		return errors.New("the peer's handshake has another command than READY")
	}
	return nil
}

func property(b []byte, name, value string) []byte {
	b = append(append(b, byte(len(name))), name...)
	b = binary.BigEndian.AppendUint32(b, uint32(len(value)))
	return append(b, value...)
}

// subscribe asks a publisher for all its messages.
func (s *socket) subscribe() error { return s.writeFrame(0, []byte{1}) }

func (s *socket) writeFrame(flags byte, body []byte) error {
	head := []byte{flags, byte(len(body))}
	if len(body) > 255 {
		head = binary.BigEndian.AppendUint64([]byte{flags | flagLong}, uint64(len(body)))
	}
	_, err := s.c.Write(append(head, body...))
	return err
}

// write sends a message.
func (s *socket) write(frames ...[]byte) error {
	for i, f := range frames {
		flags := byte(flagMore)
		if i == len(frames)-1 {
			flags = 0
		}
		if err := s.writeFrame(flags, f); err != nil {
			return err
		}
	}
	return nil
}

// readFrame reads a frame of at most limit bytes.
func (s *socket) readFrame(limit int) (flags byte, body []byte, err error) {
	if flags, err = s.br.ReadByte(); err != nil {
		return 0, nil, err
	}
	var size uint64
	if flags&flagLong != 0 {
		var b [8]byte
		if _, err := io.ReadFull(s.br, b[:]); err != nil {
			return 0, nil, err
		}
		size = binary.BigEndian.Uint64(b[:])
	} else {
		b, err := s.br.ReadByte()
		if err != nil {
			return 0, nil, err
		}
		size = uint64(b)
	}
	if size > uint64(limit) {
		return 0, nil, fmt.Errorf("a frame of %d bytes, more than %d", size, limit)
	}
	// What is announced must come before memory is given for all of it.
	const step = 1 << 20
	for left := int(size); left > 0; {
		n := min(left, step)
		at := len(body)
		body = append(body, make([]byte, n)...)
		if _, err := io.ReadFull(s.br, body[at:]); err != nil {
			return 0, nil, err
		}
		left -= n
	}
	return flags, body, nil
}

// read reads a message. Commands are answered on the way.
func (s *socket) read() (frames [][]byte, err error) {
	left := maxMessage
	for {
		flags, body, err := s.readFrame(left)
		if err != nil {
			return nil, err
		}
		if flags&flagCommand != 0 {
			if rest, ok := strings.CutPrefix(string(body), "\x04PING"); ok && len(rest) >= 2 {
				if err := s.writeFrame(flagCommand, append([]byte("\x04PONG"), rest[2:]...)); err != nil {
					return nil, err
				}
			}
			continue
		}
		left -= len(body)
		frames = append(frames, body)
		if flags&flagMore == 0 {
			return frames, nil
		}
		if len(frames) == maxFrames {
			return nil, fmt.Errorf("a message of more than %d frames", maxFrames)
		}
	}
}

func (s *socket) close() { s.c.Close() }
