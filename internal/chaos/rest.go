//go:build unix

package chaos

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"baton/internal/rig"
	"baton/transfer/shm"
	"baton/wire"
)

// holdings are what a process holds when no request runs.
type holdings struct {
	rig.Resources
	goroutines int
}

// once is a client whose connections end with their request, so that looking changes nothing.
var once = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 10 * time.Second}

// held are the gauges that are zero in a fleet without requests, by who has them.
var held = map[string][][]string{
	"engine":      {{"baton_engine_kv_blocks", `state="used"`}, {"baton_engine_requests"}},
	"coordinator": {{"baton_coordinator_requests"}, {"baton_coordinator_engine_requests"}, {"baton_coordinator_engine_blocks_reserved"}, {"baton_coordinator_queue_length"}},
	"frontend":    {{"baton_http_requests_in_flight"}},
}

// process is one of the fleet's, for a look at it.
type process struct {
	name, what, url string
	*rig.Process
}

func (d *drill) processes() []process {
	d.mu.Lock()
	defer d.mu.Unlock()
	list := []process{
		{"coordinator", "coordinator", d.hub.Metrics, d.hub.Process},
		{"frontend", "frontend", d.frontend.URL, d.frontend.Process},
	}
	for _, m := range d.members {
		list = append(list, process{m.name, "engine", m.life.Metrics, m.life.Process})
	}
	return list
}

// rest waits until no process holds anything for a request, and returns what each holds otherwise. What is
// still held after a while is a problem.
func (d *drill) rest(ctx context.Context) map[string]holdings {
	d.http.CloseIdleConnections()
	var left []string
	for deadline := time.Now().Add(15 * time.Second); time.Now().Before(deadline) && ctx.Err() == nil; pause(ctx, 50*time.Millisecond) {
		var found map[string]holdings
		if found, left = d.look(ctx); len(left) == 0 {
			return found
		}
	}
	d.problem("without requests, there is still held: %s", strings.Join(left, "; "))
	return nil
}

// look asks every process what it holds.
func (d *drill) look(ctx context.Context) (found map[string]holdings, left []string) {
	found = make(map[string]holdings)
	for _, p := range d.processes() {
		h := holdings{}
		m, err := rig.Scrape(ctx, once, p.url)
		if err == nil {
			h.Resources, err = p.Resources()
		}
		if err != nil {
			left = append(left, fmt.Sprintf("%s does not say (%v)", p.name, err))
			continue
		}
		n, _ := m.Sum("go_goroutines")
		h.goroutines = int(n)
		found[p.name] = h
		for _, series := range held[p.what] {
			n, ok := m.Sum(series[0], series[1:]...)
			if !ok && p.what != "frontend" { // which has no series before the first request
				left = append(left, fmt.Sprintf("%s has no %v", p.name, series))
			}
			if n != 0 {
				left = append(left, fmt.Sprintf("%s: %v is %v", p.name, series, n))
			}
		}
	}
	return found, left
}

// slack is by how much descriptors and goroutines may differ between two times of rest: a runtime's own come
// and go. A leak at each of the disturbances is more.
const slack = 6

// The TCP backends keep connections to a peer for later transfers: so many at most, and for so long at most
// when the peer is gone.
const (
	keptConns = 16
	keptFor   = time.Minute
)

// compare waits until every process holds no more than before the disturbance. Engines that were restarted
// are compared with their earlier lives.
func (d *drill) compare(ctx context.Context, before map[string]holdings) {
	if before == nil {
		return // reported
	}
	waited := false
	var grown []string
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline) && ctx.Err() == nil; pause(ctx, 200*time.Millisecond) {
		after := d.rest(ctx)
		if after == nil {
			return
		}
		if !waited && d.cfg.Thorough && dead(after) > 0 {
			waited = true
			d.say("%d connections to engines that are gone: waiting until they are dropped", dead(after))
			pause(ctx, keptFor)
			d.round(ctx) // they are dropped at the next use
			deadline = time.Now().Add(10 * time.Second)
			continue
		}
		if grown = d.grown(before, after); len(grown) == 0 {
			d.say("at rest: %s", summary(after))
			return
		}
	}
	for _, g := range grown {
		d.problem("leak: %s", g)
	}
}

func dead(all map[string]holdings) (n int) {
	for _, h := range all {
		n += h.Dead
	}
	return n
}

// grown tells what processes hold that they did not hold before.
func (d *drill) grown(before, after map[string]holdings) (list []string) {
	for name, was := range before {
		is := after[name]
		d.count(func(r *Drill) { r.RSS = max(r.RSS, is.RSS) })
		check := func(what string, is, was, allowed int) {
			if is > was+allowed {
				list = append(list, fmt.Sprintf("%s has %d %s, before %d", name, is, what, was))
			}
		}
		kept, pools := d.peers(name)
		check("descriptors", is.Files, was.Files, slack)
		check("TCP connections", is.Conns, was.Conns, kept)
		check("goroutines", is.goroutines, was.goroutines, slack+max(0, is.Conns-was.Conns))
		check("mapped KV pools", is.Pools, pools, 0)
		if pools > 0 && is.Pools == 0 {
			list = append(list, name+" does not map even its own KV pool: the drill cannot see such mappings here")
		}
		if d.cfg.Thorough {
			check("connections to processes that are gone", is.Dead, 0, 0)
		}
	}
	return list
}

// peers tells how many connections a process may keep, and how many pools it may map.
func (d *drill) peers(name string) (conns, pools int) {
	i := slices.IndexFunc(d.members, func(m *member) bool { return m.name == name })
	if i < 0 {
		return 0, 0
	}
	conns, pools = d.cfg.Decode*keptConns, 1
	if d.members[i].role == wire.RoleDecode {
		conns, pools = d.cfg.Prefill*keptConns, 1+d.cfg.Prefill
	}
	if d.transport == shm.Name {
		conns = 0
	}
	return conns, pools
}

func summary(all map[string]holdings) string {
	var list []string
	for name, h := range all {
		list = append(list, fmt.Sprintf("%s %d+%d fds %d goroutines %d pools %d MiB", name, h.Files, h.Conns, h.goroutines, h.Pools, h.RSS>>20))
	}
	slices.Sort(list)
	return strings.Join(list, ", ")
}
