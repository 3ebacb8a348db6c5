package sim

// checkRest makes sure that nothing is left once nothing happens any more.
func (w *world) checkRest() {
	for _, a := range w.attempts {
		if !a.ended {
			w.fail("%v never ended", a)
		}
	}
	if w.coordinator == nil {
		w.fail("no coordinator is left")
		return
	}
	if n := w.coordinator.core.Requests(); n > 0 {
		w.fail("the coordinator still has %d requests", n)
	}
	status := w.coordinator.core.Status()
	if len(status.Engines) != len(w.seats) {
		w.fail("%d of %d engines are registered", len(status.Engines), len(w.seats))
	}
	for _, e := range status.Engines {
		if e.RequestsInUse != 0 || e.BlocksReserved != 0 || e.Draining {
			w.fail("engine %s is left with %d requests and %d blocks reserved, draining %t",
				e.Name, e.RequestsInUse, e.BlocksReserved, e.Draining)
		}
	}
	for _, q := range status.Queues {
		if q.Length > 0 {
			w.fail("%d requests are left in the queue for %s", q.Length, q.Role)
		}
	}
	for _, s := range w.seats {
		if s.life == nil {
			w.fail("%s did not come back", s.name)
			continue
		}
		s.life.checkRest()
	}
	for key := range w.fabric.exports {
		w.fail("%v still exports handoff %d", key.life, key.handoff)
	}
	for _, t := range w.fabric.active {
		w.fail("%v is still under way", t)
	}
}

func (l *life) checkRest() {
	p := l.core.Pool().Stats()
	if p.InUse != 0 || p.Pinned != 0 || p.Promised != 0 || p.Free+p.Cached != p.Total {
		l.w.fail("%v is left with blocks in use: %+v", l, p)
	}
	load := l.core.Load()
	h := load.Handoff
	if load.Waiting+load.Prefill+load.Admission+load.Decode+h.Exports+h.Queued+h.Moving+h.Quarantined+h.QuarantinedBlocks != 0 {
		l.w.fail("%v is left with work: %+v", l, load)
	}
	if l.phase != serving || l.passing || len(l.transfers) > 0 {
		l.w.fail("%v is left in phase %d, in a pass %t, with %d transfers", l, l.phase, l.passing, len(l.transfers))
	}
}
