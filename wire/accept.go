package wire

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"time"
)

// AcceptAll gives each connection that l accepts to accepted, until ctx or server ends, and closes l. It returns nil
// after either end, else why accepting failed. Failures that may pass are logged and tried again.
func AcceptAll(ctx, server context.Context, l net.Listener, log *slog.Logger, accepted func(net.Conn)) error {
	defer l.Close()
	defer context.AfterFunc(ctx, func() { l.Close() })()
	defer context.AfterFunc(server, func() { l.Close() })()
	for pause := time.Duration(0); ; {
		nc, err := l.Accept()
		switch {
		case err == nil:
			pause = 0
			accepted(nc)
		case ctx.Err() != nil || server.Err() != nil:
			return nil
		case errors.Is(err, net.ErrClosed):
			return err
		default: // out of descriptors, most likely: others may free some
			pause = min(max(2*pause, 5*time.Millisecond), time.Second)
			log.Warn("accept failed", "error", err, "retry", pause)
			select {
			case <-time.After(pause):
			case <-ctx.Done():
			case <-server.Done():
			}
		}
	}
}
