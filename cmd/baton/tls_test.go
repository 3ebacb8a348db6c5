package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	stdlog "log"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"baton/internal/rig"
	"baton/wire"
)

// certs runs `baton certs` and returns its folder.
func certs(t *testing.T, flags ...string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "certs")
	var out bytes.Buffer
	if code := run(append([]string{"certs", "--dir=" + dir}, flags...), &out, &out); code != 0 {
		t.Fatalf("exit code %d: %s", code, &out)
	}
	return dir
}

func pairFlags(dir, name string) []string {
	return []string{"--tls-cert=" + filepath.Join(dir, name+".crt"), "--tls-key=" + filepath.Join(dir, name+".key")}
}

func mutualFlags(dir, name string) []string {
	return append(pairFlags(dir, name), "--tls-ca="+filepath.Join(dir, "ca.crt"))
}

// with puts flags behind a command and its own.
func with(flags []string, args ...string) []string { return append(args, flags...) }

// withKey adds an API key to each request.
type withKey struct {
	http.RoundTripper
	key string
}

func (w withKey) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+w.key)
	return w.RoundTripper.RoundTrip(r)
}

// httpsClient trusts the authority of a folder, and shows a key.
func httpsClient(t *testing.T, dir, key string) *http.Client {
	t.Helper()
	pem, err := os.ReadFile(filepath.Join(dir, "ca.crt"))
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem)
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: withKey{transport, key}}
}

func keyFile(t *testing.T, keys ...string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(path, []byte("# for tests\n"+strings.Join(keys, "\n")+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// Separate processes that trust nobody without a certificate give the very tokens of the goldens.
func TestGoldensOverTLS(t *testing.T) {
	dir, keys := certs(t), keyFile(t, "sk-tests-0123456789", "sk-other-0123456789")
	g := readGolden(t, "qwen3")
	for _, transport := range []string{"tcp", "tcp-push"} {
		t.Run(transport, func(t *testing.T) {
			f := &fleet{model: "m", parts: map[string]*part{}, client: httpsClient(t, dir, "sk-other-0123456789")}
			hub := start(t, with(mutualFlags(dir, "coordinator"), "coordinator", "--listen=127.0.0.1:0", "--metrics=127.0.0.1:0")...)
			addr := hub.await(t, `coordinator at (\S+)`)
			metrics := hub.await(t, `address=(https://\S+)`)
			for _, role := range []string{wire.RolePrefill, wire.RoleDecode} {
				start(t, with(mutualFlags(dir, "engine"), "engine", "--role="+role, "--name="+role, "--coordinator="+addr,
					"--model="+goldenPath("qwen3"), "--transfer="+transport, "--threads=2", "--kv-memory=64MiB")...)
			}
			front := start(t, with(mutualFlags(dir, "frontend"), "frontend", "--listen=127.0.0.1:0", "--coordinator="+addr,
				"--model="+goldenPath("qwen3"), "--served-model-name=m", "--api-key-file="+keys)...)
			f.url = front.await(t, `frontend at (https://\S+)`)
			f.awaitHealth(t)
			goldenRun(t, f, g)
			moved := f.complete(t, map[string]any{"prompt": []int{7, 8, 9}, "max_tokens": 4, "ignore_eos": true, "return_handoff": true}).Choices[0].Handoff
			if moved == nil || moved.BytesMoved == 0 {
				t.Errorf("nothing went over the data plane: %+v", moved)
			}
			strangers(t, f, addr, metrics)
		})
	}
}

// strangers try a fleet's ports without what it takes.
func strangers(t *testing.T, f *fleet, hub, metrics string) {
	t.Helper()
	nameless := *f
	nameless.client = &http.Client{Transport: f.client.Transport.(withKey).RoundTripper}
	if status, body, err := nameless.post(t.Context(), "/v1/completions", map[string]any{"prompt": []int{1}}); err != nil || status != http.StatusUnauthorized {
		t.Errorf("without a key: %d %s, %v", status, body, err)
	}
	nameless.client = http.DefaultClient // knows no authority of ours
	if _, _, err := nameless.post(t.Context(), "/v1/completions", map[string]any{}); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("a client that does not trust the authority: %v", err)
	}
	if resp, err := f.client.Get(metrics); err != nil || resp.StatusCode != http.StatusOK {
		t.Errorf("metrics: %v", err)
	} else {
		resp.Body.Close()
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	_, _, err := wire.Dial(ctx, "tcp", hub, wire.Connect{Kind: "client"}, wire.Options{})
	var handshake *wire.HandshakeError
	if !errors.As(err, &handshake) || !strings.Contains(err.Error(), "it may want TLS") {
		t.Errorf("a plain client at the coordinator: %v", err)
	}
}

// A process with certificates that do not fit says so and ends, or says so while it tries.
func TestWrongCertificates(t *testing.T) {
	ours, theirs := certs(t), certs(t)
	hub := start(t, with(mutualFlags(ours, "coordinator"), "coordinator", "--listen=127.0.0.1:0")...)
	addr := hub.await(t, `coordinator at (\S+)`)
	model := "--model=" + goldenPath("qwen3")
	plain := start(t, "coordinator", "--listen=127.0.0.1:0")
	plainAddr := plain.await(t, `coordinator at (\S+)`)
	for name, c := range map[string]struct {
		args []string
		says string
	}{
		"frontend of another authority": {with(mutualFlags(theirs, "frontend"), "frontend", model, "--listen=127.0.0.1:0", "--coordinator="+addr), "certificate is not signed by --tls-ca"},
		"engine of another authority":   {with(mutualFlags(theirs, "engine"), "engine", model, "--coordinator="+addr), "certificate is not signed by --tls-ca"},
		"plain engine":                  {[]string{"engine", model, "--coordinator=" + addr}, "it may want TLS"},
		"plain frontend":                {[]string{"frontend", model, "--listen=127.0.0.1:0", "--coordinator=" + addr}, "it may want TLS"},
		"engine at a plain coordinator": {with(mutualFlags(ours, "engine"), "engine", model, "--coordinator="+plainAddr), "it does not use TLS"},
	} {
		t.Run(name, func(t *testing.T) {
			p := start(t, c.args...)
			deadline := time.Now().Add(20 * time.Second)
			for !strings.Contains(p.Log.Tail(), c.says) {
				if time.Now().After(deadline) {
					t.Fatalf("it does not say %q:\n%s", c.says, p.Log.Tail())
				}
				time.Sleep(10 * time.Millisecond)
			}
		})
	}
	if text := hub.Log.Tail(); !strings.Contains(text, "connection refused") || !strings.Contains(text, "TLS with 127.0.0.1:") {
		t.Errorf("the coordinator does not say whom it refused:\n%s", text)
	}
}

// Everything in one process, with HTTPS and a key, asks itself a question through its own door.
func TestServeWithTLS(t *testing.T) {
	dir := certs(t, "--names=gpu1")
	f := serve(t, goldenPath("llama"), append(pairFlags(dir, "gpu1"), "--shards=tp=1", "--kv-memory=64MiB", "--api-key-file="+keyFile(t, "sk-tests-0123456789"))...)
	if !strings.HasPrefix(f.url, "https://") {
		t.Fatalf("serving at %s", f.url)
	}
	f.client = httpsClient(t, dir, "sk-tests-0123456789")
	g := readGolden(t, "llama")
	got := f.complete(t, map[string]any{"prompt": g.Cases[0].Prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": true}).Choices[0]
	if fmt.Sprint(got.TokenIDs) != fmt.Sprint(g.Cases[0].Generated[:8]) {
		t.Errorf("got %v, want %v", got.TokenIDs, g.Cases[0].Generated[:8])
	}
	// Plain HTTP at this port is answered by words, and by nothing else.
	resp, err := http.Get("http://" + strings.TrimPrefix(f.url, "https://") + "/health")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if body, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != http.StatusBadRequest {
		t.Errorf("plain HTTP: %s %s, %v", resp.Status, body, err)
	}
}

func TestAskItself(t *testing.T) {
	dir := certs(t)
	sec, err := certFlags{TLSCert: filepath.Join(dir, "frontend.crt"), TLSKey: filepath.Join(dir, "frontend.key")}.secure(nil)
	if err != nil {
		t.Fatal(err)
	}
	keys, err := keyFlags{keyFile(t, "sk-tests-0123456789")}.keys()
	if err != nil {
		t.Fatal(err)
	}
	self := sec.selfClient(ownKey(&keys))
	l, url, err := sec.listenHTTP("--listen", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var got string
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got = r.Header.Get("Authorization")
		fmt.Fprint(w, "data: {\"choices\":[{\"delta\":{\"content\":\"Paris\"}}]}\n\n")
	})}
	defer srv.Close()
	go srv.Serve(l)
	var out bytes.Buffer
	if err := ask(t.Context(), &out, self, url, "m", "Where?"); err != nil || !strings.Contains(out.String(), "Paris") {
		t.Fatalf("%v: %s", err, &out)
	}
	if len(got) < len("Bearer ")+20 {
		t.Errorf("the key was %q", got)
	}
	self.client.CloseIdleConnections()
}

// Addresses beyond this host want TLS, a word to the contrary, or a certificate that fits.
func TestAddressesWantTLS(t *testing.T) {
	dir := certs(t, "--hosts=10.0.0.5")
	model := "--model=" + goldenPath("llama")
	for name, c := range map[string]struct {
		args []string
		says []string
	}{
		"coordinator on every interface": {[]string{"coordinator", "--listen=:7000"},
			[]string{"--listen :7000", "baton certs --dir certs --hosts HOST", "--tls-cert certs/coordinator.crt", "--insecure"}},
		"coordinator on an address": {[]string{"coordinator", "--listen=10.0.0.1:7000"}, []string{"baton certs --dir certs --hosts 10.0.0.1"}},
		"metrics":                   {[]string{"coordinator", "--listen=127.0.0.1:0", "--metrics=0.0.0.0:0"}, []string{"--metrics 0.0.0.0:0"}},
		"engine elsewhere":          {[]string{"engine", model, "--coordinator=hub.example.com:7000"}, []string{"--coordinator hub.example.com:7000", "--hosts hub.example.com", "certs/engine.crt"}},
		"data elsewhere":            {[]string{"engine", model, "--role=decode", "--transfer=tcp", "--transfer-host=10.0.0.1"}, []string{"--transfer-host 10.0.0.1", "--hosts 10.0.0.1"}},
		"data under another name": {with(mutualFlags(dir, "engine"), "engine", model, "--role=decode", "--transfer=tcp-push", "--transfer-host=10.0.0.1"),
			[]string{"--transfer-host 10.0.0.1", "is for localhost, 127.0.0.1, ::1, 10.0.0.5, not for 10.0.0.1"}},
		"frontend on every interface":         {[]string{"frontend", model, "--listen=[::]:0"}, []string{"--listen [::]:0", "certs/frontend.crt"}},
		"frontend of a coordinator elsewhere": {[]string{"frontend", model, "--coordinator=10.0.0.1:7000"}, []string{"--coordinator 10.0.0.1:7000"}},
		"serve on every interface":            {[]string{"serve", model, "--listen=0.0.0.0:0"}, []string{"--listen 0.0.0.0:0", "--tls-cert certs/frontend.crt"}},
		"half of a pair":                      {with(pairFlags(dir, "engine")[:1], "serve", model), []string{"--tls-cert and --tls-key belong together"}},
		"a pair without its authority":        {with(pairFlags(dir, "engine"), "coordinator"), []string{"--tls-ca is missing"}},
		"a key file without a key":            {[]string{"serve", model, "--api-key-file=" + keyFile(t)}, []string{"no key in it"}},
		"a key file that is not there":        {[]string{"frontend", model, "--api-key-file=/nowhere/keys"}, []string{"/nowhere/keys"}},
		"a host with a port":                  {[]string{"certs", "--dir=" + dir, "--hosts=a:80"}, []string{`host "a:80": leave the port out`}},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		var out bytes.Buffer
		code := runContext(ctx, c.args, &out, &out)
		if ctx.Err() != nil || code != 1 {
			t.Errorf("%s: exit code %d, %v: %s", name, code, ctx.Err(), &out)
		}
		cancel()
		for _, words := range c.says {
			if !strings.Contains(out.String(), words) {
				t.Errorf("%s does not say %q:\n%s", name, words, &out)
			}
		}
	}
}

func TestLoopback(t *testing.T) {
	for addr, want := range map[string]bool{
		"127.0.0.1:80": true, "127.9.9.9:80": true, "[::1]:80": true, "localhost:80": true, "127.0.0.1": true, "::1": true,
		":80": false, "0.0.0.0:80": false, "[::]:80": false, "10.0.0.1:80": false, "localhost.example.com:80": false,
		"gpu1": false, "": false, "[fe80::1%lo]:80": false,
	} {
		if got := isLoopback(addr); got != want {
			t.Errorf("%q: %v", addr, got)
		}
	}
}

// --insecure and --plain-http permit what they say, and no more.
func TestPermissions(t *testing.T) {
	dir := certs(t)
	secure := tlsFlags{TLSCA: filepath.Join(dir, "ca.crt"), certFlags: certFlags{TLSCert: filepath.Join(dir, "engine.crt"), TLSKey: filepath.Join(dir, "engine.key")}}
	plain := secure
	plain.PlainHTTP = true
	for name, c := range map[string]struct {
		flags         tlsFlags
		dial          bool
		scheme, local string // of an HTTP port on every interface and on loopback; empty for none
	}{
		"nothing":    {tlsFlags{}, false, "", "http"},
		"insecure":   {tlsFlags{certFlags: certFlags{Insecure: true}}, true, "http", "http"},
		"plain HTTP": {tlsFlags{PlainHTTP: true}, false, "http", "http"},
		"TLS":        {secure, true, "https", "https"},
		"both":       {plain, true, "http", "http"},
	} {
		sec, err := c.flags.secure("engine", nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := sec.permit("--coordinator", "10.0.0.1:7000"); (err == nil) != c.dial {
			t.Errorf("%s: %v", name, err)
		}
		for addr, want := range map[string]string{"0.0.0.0:0": c.scheme, "127.0.0.1:0": c.local} {
			l, url, err := sec.listenHTTP("--metrics", addr)
			scheme, _, _ := strings.Cut(url, "://")
			if scheme != want || (err == nil) != (want != "") {
				t.Errorf("%s: HTTP at %s is %q, %v; want %q", name, addr, url, err, want)
			}
			if err == nil {
				l.Close()
			}
		}
	}
}

// What `baton certs` prints can be used as printed.
func TestCertsSaysHowToUseThem(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "certs")
	var first, again bytes.Buffer
	if code := run([]string{"certs", "--dir=" + dir, "--hosts=gpu1,10.0.0.5"}, &first, &first); code != 0 {
		t.Fatal(first.String())
	}
	for _, words := range []string{
		"the new authority", "for localhost, gpu1, 127.0.0.1, ::1, 10.0.0.5, until 20",
		fmt.Sprintf("baton engine --tls-ca %s/ca.crt --tls-cert %s/engine.crt --tls-key %s/engine.key", dir, dir, dir),
	} {
		if !strings.Contains(first.String(), words) {
			t.Errorf("no %q in:\n%s", words, &first)
		}
	}
	if code := run([]string{"certs", "--dir=" + dir, "--names=gpu7", "--hosts=gpu7"}, &again, &again); code != 0 || !strings.Contains(again.String(), "was there already") {
		t.Errorf("%d: %s", code, &again)
	}
	if _, err := tls.LoadX509KeyPair(filepath.Join(dir, "gpu7.crt"), filepath.Join(dir, "gpu7.key")); err != nil {
		t.Error(err)
	}
}

// A port of a fleet that a flood of strangers reaches goes on serving its own.
func TestFloodAtTheCoordinator(t *testing.T) {
	dir := certs(t)
	hub := start(t, with(mutualFlags(dir, "coordinator"), "coordinator", "--listen=127.0.0.1:0")...)
	addr := hub.await(t, `coordinator at (\S+)`)
	for i := range 600 {
		nc, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		if i%2 == 0 {
			nc.Write([]byte("\x16\x03\x01\x02\x00\x01\x00\x01")) // may fail: closed already
		}
	}
	start(t, with(mutualFlags(dir, "engine"), "engine", "--role=both", "--name=e", "--coordinator="+addr,
		"--model="+goldenPath("llama"), "--kv-memory=64MiB")...)
	f := &fleet{model: "m", client: httpsClient(t, dir, "none")}
	front := start(t, with(mutualFlags(dir, "frontend"), "frontend", "--listen=127.0.0.1:0", "--coordinator="+addr,
		"--model="+goldenPath("llama"), "--served-model-name=m")...)
	f.url = front.await(t, `frontend at (https://\S+)`)
	f.awaitHealth(t)
	f.complete(t, map[string]any{"prompt": []int{1, 2, 3}, "max_tokens": 4, "ignore_eos": true})
}

// What strangers do to the metrics port is in the process's own log, where debug lines are wanted.
func TestMetricsPortLogsThroughTheLogger(t *testing.T) {
	var std bytes.Buffer
	stdlog.SetOutput(&std)
	defer stdlog.SetOutput(os.Stderr)
	dir := certs(t)
	sec, err := certFlags{TLSCert: filepath.Join(dir, "engine.crt"), TLSKey: filepath.Join(dir, "engine.key")}.secure(nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	out, stopped := rig.NewLog(nil, nil), make(chan struct{})
	log, _ := newLogger(out, slog.LevelDebug, false)
	go func() {
		defer close(stopped)
		_ = serveMetrics(ctx, sec, "127.0.0.1:0", newRegistry(), log)
	}()
	url := await(t, out, `address=(https://\S+)`, stopped)
	if resp, err := http.Get(strings.Replace(url, "https", "http", 1)); err == nil {
		resp.Body.Close()
	}
	await(t, out, `level=DEBUG.*(TLS handshake error)`, stopped)
	cancel()
	<-stopped
	if std.Len() > 0 {
		t.Errorf("the default logger got %s", &std)
	}
}
