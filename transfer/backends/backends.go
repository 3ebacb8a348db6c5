// Package backends opens a transfer backend by name.
package backends

import (
	"fmt"
	"strings"
	"time"

	"baton/mtls"
	"baton/transfer"
	"baton/transfer/shm"
	"baton/transfer/tcp"
)

// Options tune an endpoint. Each backend takes what concerns it; zero values are its defaults.
type Options struct {
	Listen    string        // tcp, tcp-push: address to listen at, 127.0.0.1:0 by default
	Advertise string        // tcp, tcp-push: host that peers are told, where it is not Listen's
	Streams   int           // tcp, tcp-push: most connections for one transfer
	Threads   int           // shm: copies that run at once
	Timeout   time.Duration // longest silence of a peer

	TLS *mtls.Identity // tcp, tcp-push: required of every peer; nil is plain
}

// Names are the backends that Open knows.
var Names = []string{shm.Name, tcp.PullName, tcp.PushName}

// UnknownError is a name that Open does not know.
type UnknownError struct{ Name string }

func (e *UnknownError) Error() string {
	return fmt.Sprintf("transfer: no backend is called %q: choose one of %s", e.Name, strings.Join(Names, ", "))
}

// Open opens the named backend on mem. The result is a transfer.Puller or a transfer.Pusher.
func Open(name string, mem *transfer.Memory, opt Options) (transfer.Endpoint, error) {
	switch name {
	case shm.Name:
		return open(shm.New(mem, shm.Options{Threads: opt.Threads, Timeout: opt.Timeout}))
	case tcp.PullName:
		return open(tcp.NewPuller(mem, opt.tcp()))
	case tcp.PushName:
		return open(tcp.NewPusher(mem, opt.tcp()))
	}
	return nil, &UnknownError{name}
}

func (o Options) tcp() tcp.Options {
	return tcp.Options{Listen: o.Listen, Advertise: o.Advertise, Streams: o.Streams, Timeout: o.Timeout, TLS: o.TLS}
}

// open keeps a nil pointer from becoming an interface that is not nil.
func open[E transfer.Endpoint](e E, err error) (transfer.Endpoint, error) {
	if err != nil {
		return nil, err
	}
	return e, nil
}
