package sim

import "slices"

// Shrink looks for a smaller script that still fails, in at most budget runs, and returns it with its
// failure. It leaves out faults and requests, then makes the transfers better.
func Shrink(s Script, failure error, budget int) (Script, error) {
	try := func(smaller Script) bool {
		if budget--; budget < 0 || len(smaller.Requests) == 0 {
			return false
		}
		_, err := Run(smaller, Options{})
		if err == nil {
			return false
		}
		s, failure = smaller, err
		return true
	}
	for progress := true; progress && budget > 0; {
		progress = false
		for i := len(s.Faults) - 1; i >= 0; i-- {
			smaller := s
			smaller.Faults = slices.Delete(slices.Clone(s.Faults), i, i+1)
			progress = try(smaller) || progress
		}
		for i := len(s.Requests) - 1; i >= 0; i-- {
			smaller := s
			smaller.Requests = slices.Delete(slices.Clone(s.Requests), i, i+1)
			progress = try(smaller) || progress
		}
		for _, simpler := range s.simpler() {
			progress = try(simpler) || progress
		}
	}
	return s, failure
}

// simpler lists scripts that differ from s in one thing that matters less.
func (s Script) simpler() []Script {
	var list []Script
	add := func(field *int, less int) {
		if old := *field; old != less {
			*field = less
			list = append(list, s)
			*field = old
		}
	}
	add(&s.Fleet.Fail, 0)
	add(&s.Fleet.Hang, 0)
	add(&s.Fleet.Unsafe, 0)
	add(&s.Fleet.Flip, 0)
	if s.Fleet.Verify != "off" && s.Fleet.Flip == 0 {
		plain := s
		plain.Fleet.Verify = "off"
		list = append(list, plain)
	}
	for i := range s.Requests {
		s.Requests = slices.Clone(s.Requests)
		r := &s.Requests[i]
		old := *r
		if r.Abort, r.Logprobs, r.Stop, r.Salt, r.Session = 0, false, 0, 0, 0; *r != old {
			list = append(list, s)
		}
		s.Requests = slices.Clone(s.Requests)
		s.Requests[i] = old
	}
	return list
}
