//go:build unix

package chaos

import (
	"context"
	"log/slog"
	"strings"
	"time"

	"baton/wire"
)

var quiet = slog.New(slog.DiscardHandler)

// outage is a time in which the fleet could not serve.
type outage struct {
	what     string // "coordinator", or the role that no engine had
	from, to time.Time
	over     bool
}

const (
	// waits is how long requests wait, at least, for an engine of a role that nobody has.
	waits = 8 * time.Second
	// aftermath is how long after its return a coordinator may still refuse, while engines and frontends find it.
	aftermath = 3 * time.Second
)

// excused tells whether a request of that time may have been refused.
func (d *drill) excused(from, to time.Time) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, o := range d.outages {
		if o.what == "coordinator" {
			o.to = o.to.Add(aftermath)
		} else if o.to.Sub(o.from) < waits {
			continue
		}
		if to.After(o.from) && (!o.over || from.Before(o.to)) {
			return true
		}
	}
	return false
}

// watch keeps the list of outages, and restarts engines that ended of themselves.
func (d *drill) watch(ctx context.Context) {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		asked := time.Now()
		status, err := d.observer.Status(ctx)
		if ctx.Err() != nil {
			return
		}
		d.lookAt(asked, status, err)
		d.revive(ctx)
	}
}

// lookAt takes in what the coordinator says of the fleet.
func (d *drill) lookAt(now time.Time, status *wire.StatusReply, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.note("coordinator", now, err != nil || d.hubBusy)
	if err != nil {
		return
	}
	known := make(map[string]bool)
	for _, e := range status.Engines {
		known[e.Name] = !e.Draining
	}
	alive := make(map[string]int)
	for _, m := range d.members {
		if m.up && known[m.name] {
			alive[m.role]++
		}
	}
	for _, role := range []string{wire.RolePrefill, wire.RoleDecode} {
		d.note(role, now, alive[role] == 0)
	}
}

// note makes an outage begin, go on or end; d.mu is held.
func (d *drill) note(what string, now time.Time, out bool) {
	for i := range d.outages {
		if o := &d.outages[i]; o.what == what && !o.over {
			o.to, o.over = now, !out
			return
		}
	}
	if out {
		d.outages = append(d.outages, outage{what: what, from: now, to: now})
	}
}

// revive restarts engines that nobody ended.
func (d *drill) revive(ctx context.Context) {
	for _, m := range d.members {
		d.mu.Lock()
		dead := !m.busy && !m.life.Alive()
		d.mu.Unlock()
		if !dead {
			continue
		}
		d.problem("%s ended of itself with code %d; it said last:\n%s", m.name, m.life.ExitCode(), lastLines(m.life.Log.Tail(), 12))
		if err := d.raise(ctx, m); err != nil {
			d.problem("%s does not come back: %v", m.name, err)
		}
	}
}

func lastLines(s string, n int) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// line counts what the coordinator says it did for requests.
func (d *drill) line(name, line string) {
	if name != "coordinator" {
		return
	}
	switch {
	case strings.Contains(line, "another decode engine takes over"):
		d.count(func(r *Drill) { r.Takeovers++ })
	case strings.Contains(line, "its prompt runs again"):
		d.count(func(r *Drill) { r.Reruns++ })
	}
}
