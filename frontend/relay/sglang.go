package relay

import "strconv"

// sglang is SGLang's bootstrap: the same body to both workers at once, which find each other at the prefill worker's
// bootstrap server.
type sglang struct{}

func (sglang) name() string          { return "sglang" }
func (sglang) together() bool        { return true }
func (sglang) mergesUsage() bool     { return true }
func (sglang) whole(*request) string { return "" }

func (sglang) advice() string {
	return "start the workers with --disaggregation-mode prefill and decode"
}

func (sglang) single(t *try) leg { return passOn(t, reserved...) }

// room is where the two workers meet for a request: positive, below 2^63, never used twice. A prefill worker with several
// data-parallel ranks takes one by the room's remainder, and ids that are not made in bursts have a counter of 0: so the rest of
// them is mixed into these bits.
func room(id int64) int64 {
	const golden = 0x9e3779b97f4a7c15 // 2^64 by the golden ratio: its multiples spread
	return id ^ int64(uint64(id>>counterBits)*golden>>(64-counterBits))
}

// both is the body of either leg.
func (sglang) both(t *try) (leg, error) {
	if n := t.r.body.getSet("n"); n != nil && string(n) != "1" {
		// Its samples would all meet in one room.
		return leg{}, badRequest("n", "n is %.20s; SGLang's prefill and decode workers take one choice of a prompt: send as many requests", n)
	}
	var e edit
	e.remove(reserved...)
	meet := strconv.AppendInt(nil, room(t.id), 10)
	host := appendString(nil, t.source.hostname)
	port := strconv.AppendInt(nil, int64(t.source.bootstrapPort()), 10)
	if n := t.r.prompts(); n > 1 {
		host, port = repeat(host, n), repeat(port, n)
		rooms := []byte{'['}
		for i := range n {
			if i > 0 {
				rooms = append(rooms, ',')
			}
			rooms = strconv.AppendInt(rooms, room(t.mint()), 10)
		}
		meet = append(rooms, ']')
	}
	e.put("bootstrap_host", host)
	e.put("bootstrap_port", port)
	e.put("bootstrap_room", meet)
	return leg{body: e.apply(&t.r.body)}, nil
}

func repeat(v []byte, n int) []byte {
	list := []byte{'['}
	for i := range n {
		if i > 0 {
			list = append(list, ',')
		}
		list = append(list, v...)
	}
	return append(list, ']')
}

func (d sglang) prefill(t *try) (leg, error) { return d.both(t) }
func (d sglang) decode(t *try) (leg, error)  { return d.both(t) }
func (sglang) read(*try) (verdict, error)    { return goOn, nil }
