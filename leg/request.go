package leg

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"

	"baton/client"
	"baton/kvcache"
	"baton/wire"
)

// Kind is which part of a request a job is.
type Kind uint8

// The kinds.
const (
	Whole      Kind = iota // from prompt to end, on a colocated engine
	Context                // the prompt and the first token, on a prefill engine
	Generation             // all after that, on a decode engine
)

// String is the kind in disaggregated_params' words.
func (k Kind) String() string {
	switch k {
	case Context:
		return "context_only"
	case Generation:
		return "generation_only"
	}
	return "context_and_generation"
}

// Job is what a client wants of this process's engines. The ID of its request counts for nothing.
type Job struct {
	Kind    Kind
	Request *wire.SubmitRequest
	// Group is the data-parallel group that is to run it; -1 leaves the choice to the session, or to what is cached, or to the
	// load.
	Group int
	// Chain is that of the prompt's blocks, if somebody has had the time to compute it.
	Chain []kvcache.Digest
	// Prompt is the PromptDigest of the request, if somebody has had the time to compute it. Whole requests need none.
	Prompt [32]byte
	// State, of a generation leg, is what its context leg left; nil when that left nothing. Digest is that of its bytes.
	State  *wire.KVState
	Digest [32]byte
	// First, of a generation leg, has the tokens that the context leg sampled, with their log-probabilities when those
	// were asked for, and CachedTokens.
	First wire.Result
	// Once says that nobody tries again with the state: when the generation leg fails, the export is not left to its lease.
	Once bool
}

// FinishNotFinished ends a context leg after which there is more to generate.
const FinishNotFinished = "not_finished"

// RequestError is how a job failed. Its codes are wire's.
type RequestError struct {
	Code      string
	Field     string // of the request at fault, when one is
	Message   string
	Retryable bool // the same job may succeed later; with wire.CodeGone, the same request, from its context leg on
}

func (e *RequestError) Error() string { return e.Message }

func invalid(field, format string, args ...any) *RequestError {
	return &RequestError{Code: wire.CodeInvalid, Field: field, Message: fmt.Sprintf(format, args...)}
}

func unavailable(format string, args ...any) *RequestError {
	return &RequestError{Code: wire.CodeUnavailable, Message: fmt.Sprintf(format, args...), Retryable: true}
}

func gone(format string, args ...any) *RequestError {
	return &RequestError{Code: wire.CodeGone, Message: fmt.Sprintf(format, args...), Retryable: true}
}

// request is a job until nothing of it is left on its engine. What a context leg exports is an export from then on.
type request struct {
	id     uint64
	group  *group
	job    Job
	read   *read // of a generation leg, until it has its KV
	tokens int   // of the prompt
	closed bool  // the client knows the end, or is gone
}

// requestType names the field of clients that says which kind a job is.
const requestType = "disaggregated_params.request_type"

// submit begins a job or refuses it.
func (c *Core) submit(id uint64, job Job) {
	refuse := func(err *RequestError) {
		c.act(Fail{id, *err})
		c.giveUp(id, job)
	}
	g, err := c.choose(&job)
	if err == nil {
		err = c.check(g, &job)
	}
	if err != nil {
		refuse(err)
		return
	}
	if job.Kind != Whole && job.Prompt == ([32]byte{}) {
		job.Prompt = PromptDigest(job.Request.Salt, job.Request.Prompt)
	}
	r := &request{id: id, group: g, job: job, tokens: len(job.Request.Prompt)}
	if job.Kind == Generation {
		if done, err := c.checkGeneration(r); err != nil || done {
			if err != nil {
				refuse(err)
			}
			return
		}
	}
	c.requests[id] = r
	c.held += r.tokens
	if name := job.Request.Session; name != "" {
		c.cache.saw(name, c.now)
	}
	g.requests++
	if job.Kind == Generation {
		c.claim(r)
		return
	}
	m := *job.Request
	m.ID, m.Handoff = id, job.Kind == Context
	c.tell(g, &m)
}

// choose picks the data-parallel group: the one that was asked for, the session's, or else the one that has most of the prompt
// cached and room for a request, of equals the one with least to do.
func (c *Core) choose(job *Job) (*group, *RequestError) {
	n := len(c.groups)
	if job.Group >= n {
		return nil, invalid("disaggregated_params.ctx_dp_rank", "ctx_dp_rank is %d; this engine has %d data-parallel groups", job.Group, n)
	}
	var g *group
	switch session := job.Request.Session; {
	case job.Group >= 0:
		g = c.groups[job.Group]
	case session != "":
		g = c.groups[client.Index(session, n)]
	default:
		g = c.groups[c.turn%n]
		for i := range c.groups {
			if o := c.groups[(c.turn+i)%n]; o != g && c.better(o, g, job.Chain) {
				g = o
			}
		}
		c.turn = g.number + 1
	}
	switch {
	case !c.drained.IsZero() || g.leaving:
		return nil, unavailable("the engine is stopping")
	case g.reg == nil:
		return nil, unavailable("engine %s is not up", g.name)
	}
	return g, nil
}

// better reports whether a request should rather go to a than to b.
func (c *Core) better(a, b *group, chain []kvcache.Digest) bool {
	up := func(g *group) bool { return g.reg != nil && !g.leaving }
	if !up(a) || !up(b) {
		return up(a) && !up(b)
	}
	load := func(g *group) int { return g.requests + g.exports }
	room := func(g *group) bool { return load(g) < g.reg.Requests }
	if room(a) != room(b) {
		return room(a)
	}
	if d := c.cache.held(a.number, chain) - c.cache.held(b.number, chain); d != 0 && room(a) {
		return d > 0
	}
	return load(a) < load(b)
}

// check refuses what the engine's role does not do, and what is too much.
func (c *Core) check(g *group, job *Job) *RequestError {
	prompt := len(job.Request.Prompt)
	role := g.reg.Role
	switch {
	case prompt == 0:
		return invalid("prompt", "the prompt is empty")
	case job.Kind == Context && role != wire.RolePrefill, job.Kind == Generation && role != wire.RoleDecode:
		return invalid(requestType, "%s is not for this engine, whose --role is %s", job.Kind, role)
	case job.Kind == Whole && role == wire.RolePrefill:
		return invalid(requestType, "this is a prefill engine (--role): it takes context_only requests, and another goes on with what they leave")
	case job.Kind == Whole && role == wire.RoleDecode:
		return invalid(requestType, "this is a decode engine (--role): it runs no prompt, and takes generation_only requests with what a context_only one left on a prefill engine")
	case len(c.requests) >= c.cfg.Requests:
		return unavailable("%d requests are under way already, as many as may; try again later", c.cfg.Requests)
	case c.held+prompt > c.cfg.HeldTokens:
		return unavailable("running requests have %d tokens already, of %d that may be held; try again later", c.held, c.cfg.HeldTokens)
	}
	return nil
}

// results takes an engine's news.
func (c *Core) results(g *group, results []wire.Result) {
	for i := range results {
		res := &results[i]
		r := c.requests[res.ID]
		switch {
		case r == nil || r.group != g:
			c.warn("ignored tokens of request %d from %s: it does not run there", res.ID, g.name)
		case res.Export != nil:
			c.exported(r, res)
		case res.Finish == wire.FinishEvicted:
			c.fail(r, unavailable("the engine had no KV memory left for the request; with --continuation -1 it sets all aside beforehand"))
			c.end(r)
		default:
			c.deliver(r, res)
		}
	}
}

// deliver passes a result on. The engine's last one ends the job.
func (c *Core) deliver(r *request, res *wire.Result) {
	last := res.Finish != ""
	if !r.closed {
		c.act(Deliver{ID: r.id, Result: *res, Group: r.group.number, End: last})
	}
	if last {
		r.closed = true
		c.end(r)
	}
}

// fail tells the client how a job ended, unless it knows or is gone.
func (c *Core) fail(r *request, err *RequestError) {
	if !r.closed {
		r.closed = true
		c.act(Fail{r.id, *err})
	}
}

// end forgets a request of which nothing is left on its engine.
func (c *Core) end(r *request) {
	if c.requests[r.id] == r {
		delete(c.requests, r.id)
		c.held -= r.tokens
		r.group.requests--
	}
}

// cancel gives a job up. What its engine still has of it ends with the engine's word.
func (c *Core) cancel(id uint64) {
	r := c.requests[id]
	if r == nil || r.closed {
		return
	}
	r.closed = true
	c.stop(r)
}

// stop ends a request on its engine, if that knows it.
func (c *Core) stop(r *request) {
	if r.read != nil && !r.read.begun {
		c.release(r)
		c.end(r)
		return
	}
	c.tell(r.group, &wire.AbortRequest{ID: r.id})
}

// aborted takes an engine's confirmation of an abort.
func (c *Core) aborted(g *group, m *wire.RequestAborted) {
	r := c.requests[m.ID]
	if r == nil || r.group != g {
		return // it ended by itself meanwhile
	}
	if !r.closed {
		c.leaveSource(r, m.SourceSafe)
		c.fail(r, unavailable("engine %s gave the request up", g.name))
	} else {
		c.release(r)
	}
	c.end(r)
}

// failed takes an engine's report that a request, or an export of one, cannot go on.
func (c *Core) failed(g *group, m *wire.RequestError) {
	if x := c.exports[m.ID]; x != nil && x.group == g {
		c.exportFailed(x, m)
		return
	}
	r := c.requests[m.ID]
	if r == nil || r.group != g {
		return // a failed copy of a request that is over
	}
	err := &RequestError{Code: m.Code, Field: m.Field, Message: m.Message, Retryable: m.Retryable}
	if r.read != nil {
		c.stats.Lost++
		err.Field = fieldOfState(err.Field)
	}
	c.leaveSource(r, m.SourceSafe)
	c.fail(r, err)
	c.end(r)
}

// PromptDigest names a prompt in a KVState.
func PromptDigest(salt string, prompt []int32) [32]byte {
	root := kvcache.Root(salt, "")
	b := append(make([]byte, 0, len(root)+4*len(prompt)), root[:]...)
	for _, id := range prompt {
		b = binary.LittleEndian.AppendUint32(b, uint32(id))
	}
	return sha256.Sum256(b)
}

// sorted lists a map's values in order of their keys: the same events give the same actions.
func sorted[K cmp.Ordered, V any](m map[K]V) []V {
	values := make([]V, 0, len(m))
	for _, k := range slices.Sorted(maps.Keys(m)) {
		values = append(values, m[k])
	}
	return values
}
