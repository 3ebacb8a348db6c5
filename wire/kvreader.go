package wire

// KVReader follows what an engine reports with KVEvents: it notices gaps, and has them mended by a snapshot. The zero value
// has heard nothing.
type KVReader struct {
	// Reports says that a snapshot has begun: what the engine has cached is known from then on.
	Reports bool
	next    uint64 // the number that is due
	asked   bool   // for a snapshot, which is not here yet
}

// Take reports whether the events are to be applied: with Reset, once all that was known is forgotten. If they are not, ask is
// what to ask the engine, nil when it has been asked.
func (r *KVReader) Take(m *KVEvents) (apply bool, ask *KVResync) {
	switch {
	case m.Reset:
		r.Reports, r.asked = true, false
	case r.asked:
		return false, nil // the snapshot has it
	case !r.Reports || m.Sequence != r.next:
		r.asked = true
		return false, &KVResync{Expected: r.next}
	}
	r.next = m.Next
	return true, nil
}
