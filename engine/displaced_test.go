package engine

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"baton/checkpoint"
	"baton/coordinator"
	"baton/wire"
)

// Two engines by one mistake under one name: the first ends with the reason, the second serves undisturbed.
func TestDisplacedEngineEnds(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	ck, err := checkpoint.Open("../testdata/goldens/llama")
	if err != nil {
		t.Fatal(err)
	}
	defer ck.Close()
	hub, err := coordinator.NewServer(coordinator.ServerConfig{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer hub.Close()
	client, err := hub.Client(coordinator.ClientConfig{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	dial := func(_ context.Context, hello wire.Connect) (*wire.Conn, error) { return hub.Connect(hello) }
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var ends [2]chan error
	for i := range ends {
		e, err := Open(t.Context(), Config{Name: "twin", Checkpoint: ck, KVBytes: 16 << 20, Threads: 1})
		if err != nil {
			t.Fatal(err)
		}
		ends[i] = make(chan error, 1)
		go func() {
			err := e.Run(ctx, dial)
			if closed := e.Close(); err == nil {
				err = closed
			}
			ends[i] <- err
		}()
		if i == 0 {
			awaitEngines(t, client, 1)
		}
	}
	select {
	case err := <-ends[0]:
		if err == nil || !strings.Contains(err.Error(), "another process registered as engine twin") || !strings.Contains(err.Error(), "--name") {
			t.Fatalf("the first one ended with %v", err)
		}
	case err := <-ends[1]:
		t.Fatalf("the second one ended with %v", err)
	case <-time.After(10 * time.Second):
		t.Fatal("both go on")
	}
	if a := ask(t, client); a.err != nil || len(a.tokens) == 0 {
		t.Fatalf("the one that is left answers %v", a)
	}
	stop()
	if err := <-ends[1]; err != nil {
		t.Fatalf("the second one ended with %v when it was asked to", err)
	}
}

func awaitEngines(t *testing.T, client *coordinator.Client, n int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for {
		status, err := client.Status(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if len(status.Engines) == n {
			return
		}
	}
}

// An engine whose coordinator is away says so once, and once more when something else is in the way.
func TestAwayCoordinatorIsToldOnce(t *testing.T) {
	ck, err := checkpoint.Open("../testdata/goldens/llama")
	if err != nil {
		t.Fatal(err)
	}
	defer ck.Close()
	var log bytes.Buffer
	e, err := Open(t.Context(), Config{
		Checkpoint: ck, KVBytes: 1 << 20, MaxRequests: 1, Threads: 1,
		Logger: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	ctx, stop := context.WithCancel(t.Context())
	tries := 0
	err = e.Run(ctx, func(context.Context, wire.Connect) (*wire.Conn, error) {
		switch tries++; {
		case tries <= 2:
			return nil, errors.New("connection refused")
		case tries == 5:
			stop()
		}
		return nil, errors.New("it may want TLS")
	})
	if err != nil {
		t.Fatal(err)
	}
	if said := log.String(); strings.Count(said, "level=WARN") != 2 || strings.Count(said, "level=DEBUG") != 2 {
		t.Errorf("it says\n%s", said)
	}
}
