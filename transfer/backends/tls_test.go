package backends_test

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"testing"

	"baton/mtls"
	"baton/transfer"
	"baton/transfer/backends"
)

// Under TLS the same bytes arrive, whatever the fragments, and a cancelled transfer is as quiet as without.
func TestOverTLS(t *testing.T) {
	a, _, err := mtls.OpenAuthority(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	c, err := a.Issue("engine", nil)
	if err != nil {
		t.Fatal(err)
	}
	id, err := mtls.Load(c.Files, nil)
	if err != nil {
		t.Fatal(err)
	}
	const size = 8 << 20 // two connections
	for _, name := range []string{"tcp", "tcp-push"} {
		t.Run(name, func(t *testing.T) {
			from, to := openWith(t, name, size, backends.Options{TLS: id}), openWith(t, name, size, backends.Options{TLS: id})
			from.fillRandom(1)
			rng := rand.New(rand.NewPCG(1, 2))
			for round, c := range []struct {
				n       int
				longest int64
			}{{1, 1}, {1, size}, {4, 1 << 20}, {300, 20_000}, {5000, 100}} {
				copies := randomCopies(rng, c.n, size, size, c.longest)
				want := append([]byte(nil), to.mem.Data...)
				apply(want, from.mem.Data, copies)
				move(t, from, to, uint64(round), copies)
				requireEqual(t, to.mem.Data, want)
			}
			zero := make([]byte, size)
			for i := range uint64(4) {
				h, err := start(t.Context(), from, to, 10+i, []transfer.Copy{{Len: size}})
				if err != nil {
					t.Fatal(err)
				}
				eventually(t, "under way", func() bool { st := h.Poll(); return st.Bytes >= int64(i)<<20 || st.State != transfer.Running })
				h.Cancel()
				wait(t, h)
				eventually(t, "quiesced", func() bool { return h.Poll().State != transfer.Unsafe })
				clear(to.mem.Data)
				if p, ok := from.Endpoint.(transfer.Puller); ok {
					eventually(t, "source released", func() bool { return p.Revoke(10 + i) })
				}
				if !bytes.Equal(to.mem.Data, zero) {
					t.Fatal("bytes were written after the transfer was quiesced")
				}
				if st := h.Poll(); st.State != transfer.Done && !errors.Is(st.Err, context.Canceled) {
					t.Fatalf("got %+v", st)
				}
			}
			move(t, from, to, 1000, []transfer.Copy{{Len: size}}) // the endpoints still work
			requireEqual(t, to.mem.Data, from.mem.Data)
		})
	}
}
