package doctor

import (
	"context"
	"encoding/json/v2"
	"errors"
	"fmt"
	"net/url"
	"sync"
)

// sglang tries SGLang's bootstrap: the same request to both, which meet at the prefill server's bootstrap port.
func (t *trial) sglang(ctx context.Context) {
	if t.d.Role != RoleDecode || t.p.Role != RolePrefill {
		t.handoff.Evidence = "the servers are not in disaggregation mode"
		return // the findings about their roles say what to do
	}
	u, err := url.Parse(t.p.URL)
	if err != nil {
		return
	}
	port := t.p.bootstrap
	if port == 0 {
		port = t.BootstrapPort
	}
	host, _ := json.Marshal(u.Hostname()) // of a URL that was parsed
	fields := fmt.Sprintf(`,"max_tokens":%d,"bootstrap_host":%s,"bootstrap_port":%d,"bootstrap_room":%d`, answerTokens, host, port, t.number)
	second := t.together(ctx, t.body(t.p, t.ids, fields), t.body(t.d, t.ids, fields))
	if second == nil {
		return
	}
	t.moved(true, "the decode server answered, and in its mode it computes no prompts")
	t.good()
}

// Who failed first, of two legs that wait for each other.
var (
	errPrefillLeg = errors.New("the prefill leg")
	errDecodeLeg  = errors.New("the decode leg")
)

// together sends both legs at once and returns the decode server's reply; nil after a finding.
func (t *trial) together(ctx context.Context, prefill, decode []byte) *reply {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var first, second *answer
	var err1, err2 error
	var group sync.WaitGroup
	group.Go(func() {
		if first, err1 = t.post(ctx, t.p.URL+completions, prefill, t.id); !first.ok() {
			cancel(errPrefillLeg) // nobody will come to meet the decode server
		}
	})
	group.Go(func() {
		if second, err2 = t.post(ctx, t.d.URL+completions, decode, t.id); !second.ok() {
			cancel(errDecodeLeg)
		}
	})
	group.Wait()
	failed := func(a *answer, err error) *reply {
		problem := ""
		if err != nil {
			problem = " failed: " + err.Error()
		} else {
			problem = " was refused, " + a.failure()
		}
		t.find(Wrong, t.subject, context.Cause(ctx).Error()+problem,
			"see both logs; is the prefill server's bootstrap port open to the decode server? (--bootstrap-port says which)")
		return nil
	}
	var r reply
	switch {
	case context.Cause(ctx) == errPrefillLeg:
		return failed(first, err1)
	case context.Cause(ctx) == errDecodeLeg:
		return failed(second, err2)
	case !second.read(&r) || len(r.Choices) == 0:
		t.find(Wrong, t.subject, "the decode leg was answered with something else than a completion: "+shorten(string(second.body)), "")
		return nil
	}
	t.legs(first.took, second.took)
	return &r
}
