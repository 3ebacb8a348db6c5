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

// both is the body of either leg. The room is the request's id: positive, below 2^63, never used twice.
func (sglang) both(t *try) leg {
	var e edit
	e.remove(reserved...)
	room := strconv.AppendInt(nil, t.id, 10)
	host := appendString(nil, t.source.hostname)
	port := strconv.AppendInt(nil, int64(t.source.bootstrapPort()), 10)
	if n := t.r.prompts(); n > 1 {
		host, port = repeat(host, n), repeat(port, n)
		rooms := []byte{'['}
		for i := range n {
			if i > 0 {
				rooms = append(rooms, ',')
			}
			rooms = strconv.AppendInt(rooms, t.mint(), 10)
		}
		room = append(rooms, ']')
	}
	e.put("bootstrap_host", host)
	e.put("bootstrap_port", port)
	e.put("bootstrap_room", room)
	return leg{body: e.apply(&t.r.body)}
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

func (d sglang) prefill(t *try) (leg, error) { return d.both(t), nil }
func (d sglang) decode(t *try) (leg, error)  { return d.both(t), nil }
func (sglang) read(*try) (verdict, error)    { return goOn, nil }
