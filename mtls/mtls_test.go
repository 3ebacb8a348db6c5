package mtls

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func authority(t *testing.T) *Authority {
	t.Helper()
	a, created, err := OpenAuthority(filepath.Join(t.TempDir(), "certs"))
	if err != nil || !created {
		t.Fatal(created, err)
	}
	return a
}

func issue(t *testing.T, a *Authority, name string, hosts ...string) Files {
	t.Helper()
	c, err := a.Issue(name, hosts)
	if err != nil {
		t.Fatal(err)
	}
	return c.Files
}

func load(t *testing.T, f Files) *Identity {
	t.Helper()
	id, err := Load(f, nil)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// forge issues a certificate that Issue would not: change alters the template.
func forge(t *testing.T, a *Authority, change func(*x509.Certificate)) *tls.Certificate {
	t.Helper()
	f := issue(t, a, "forged")
	pair, err := tls.LoadX509KeyPair(f.Cert, f.Key)
	if err != nil {
		t.Fatal(err)
	}
	template := *pair.Leaf
	change(&template)
	der, err := x509.CreateCertificate(rand.Reader, &template, a.Cert, pair.Leaf.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: pair.PrivateKey, Leaf: leaf}
}

func serverOf(cert *tls.Certificate) func(*tls.Config) {
	return func(c *tls.Config) {
		c.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return cert, nil }
	}
}

func clientOf(cert *tls.Certificate) func(*tls.Config) {
	return func(c *tls.Config) {
		c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return cert, nil }
	}
}

func expired(c *x509.Certificate) {
	c.NotBefore, c.NotAfter = time.Now().Add(-48*time.Hour), time.Now().Add(-24*time.Hour)
}

// meet lets a client call a server over loopback, each writing one byte and reading one, and returns what
// went wrong on either side. Configurations that are nil are of peers that know no TLS.
func meet(t *testing.T, server, client *tls.Config) (serverErr, clientErr error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	talk := func(nc net.Conn) error {
		defer nc.Close()
		nc.SetDeadline(time.Now().Add(3 * time.Second))
		if _, err := nc.Write([]byte("hello")); err != nil {
			return err
		}
		_, err := io.ReadFull(nc, make([]byte, 5))
		return err
	}
	served := make(chan error, 1)
	go func() {
		nc, err := ln.Accept()
		if err == nil && server != nil {
			var c *Conn
			if c, err = Server(ctx, nc, server); err == nil {
				nc = c
			}
		}
		if err == nil {
			err = talk(nc)
		}
		served <- err
	}()
	addr := ln.Addr().String()
	nc, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	if client != nil {
		var c *Conn
		if c, err = Client(ctx, nc, client, addr); err == nil {
			nc = c
		}
	}
	if err == nil {
		err = talk(nc)
	}
	return <-served, err
}

func TestHandshakes(t *testing.T) {
	a, b := authority(t), authority(t)
	ours, theirs := load(t, issue(t, a, "engine")), load(t, issue(t, b, "engine"))
	elsewhere := load(t, issue(t, a, "elsewhere", "gpu1.example.com", "10.0.0.7"))
	old := forge(t, a, expired)
	early := forge(t, a, func(c *x509.Certificate) { c.NotBefore = time.Now().Add(time.Hour) })
	serverOnly := forge(t, a, func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} })
	clientOnly := forge(t, a, func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth} })
	with := func(c *tls.Config, change func(*tls.Config)) *tls.Config { change(c); return c }
	none := func(c *tls.Config) { c.GetClientCertificate = nil }
	for _, c := range []struct {
		name           string
		server, client *tls.Config
		says           string // the server's error; empty for success
		clientSays     string
	}{
		{"same authority", ours.Server(), ours.Client(), "", ""},
		{"other name", ours.Server(), with(elsewhere.Client(), func(c *tls.Config) { c.ServerName = "localhost" }), "", ""},
		{"another authority", ours.Server(), theirs.Client(),
			"it does not accept this side's certificate, and", "its certificate is not signed by --tls-ca"},
		{"client of another authority", ours.Server(), with(ours.Client(), clientOf(theirs.cert)),
			"its certificate is not signed by --tls-ca", "this side's certificate is not signed by the --tls-ca of the other"},
		{"no client certificate", ours.Server(), with(ours.Client(), none), "it shows no certificate", "it wants a certificate and this side shows none"},
		{"expired server", with(ours.Server(), serverOf(old)), ours.Client(), "does not accept this side's certificate", "its certificate expired at"},
		{"expired client", ours.Server(), with(ours.Client(), clientOf(old)), "its certificate expired at", "this side's certificate has expired"},
		{"server from the future", with(ours.Server(), serverOf(early)), ours.Client(), "this side's certificate", "check both clocks"},
		{"server of another host", elsewhere.Server(), with(ours.Client(), func(c *tls.Config) { c.ServerName = "gpu2.example.com" }),
			"does not accept this side's certificate", "its certificate is for localhost, gpu1.example.com, 127.0.0.1, ::1, 10.0.0.7, not for gpu2.example.com"},
		{"client certificate on a server", with(ours.Server(), serverOf(clientOnly)), ours.Client(), "", "not made for this use"},
		{"server certificate on a client", ours.Server(), with(ours.Client(), clientOf(serverOnly)), "not made for this use", "does not accept this side's certificate"},
		{"plain client", ours.Server(), nil, "it does not use TLS and this side does", "EOF"},
		{"plain server", nil, ours.Client(), "", "it does not use TLS"},
		{"old TLS", ours.Server(), with(ours.Client(), func(c *tls.Config) { c.MinVersion, c.MaxVersion = 0, tls.VersionTLS12 }),
			"unsupported versions", "it speaks no TLS 1.3"},
		{"http identity", load(t, Files{Cert: ours.files.Cert, Key: ours.files.Key}).Server(), ours.Client(), "its certificate is not signed by --tls-ca", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			began := time.Now()
			serverErr, clientErr := meet(t, c.server, c.client)
			if c.says == "" && c.clientSays == "" {
				if serverErr != nil || clientErr != nil {
					t.Fatalf("server: %v; client: %v", serverErr, clientErr)
				}
				return
			}
			for side, got := range map[string]struct {
				err  error
				says string
			}{"server": {serverErr, c.says}, "client": {clientErr, c.clientSays}} {
				if got.says != "" && (got.err == nil || !strings.Contains(got.err.Error(), got.says)) {
					t.Errorf("the %s says %v, want %q", side, got.err, got.says)
				}
				var typed *Error
				if got.says != "" && got.says != "EOF" && (!errors.As(got.err, &typed) || !strings.Contains(typed.Peer, "127.0.0.1:")) {
					t.Errorf("the %s's error is a %T for %+v", side, got.err, typed)
				}
			}
			if took := time.Since(began); took > 2*time.Second {
				t.Errorf("took %v", took)
			}
		})
	}
}

// A client's first words may look like a TLS record; neither they nor silence hold a server.
func TestStrangersAtTheDoor(t *testing.T) {
	id := load(t, issue(t, authority(t), "engine"))
	for name, say := range map[string][]byte{
		"silence":        nil,
		"a byte":         {22},
		"wire frame":     {22, 0, 0, 0, 0x92},
		"half a record":  {22, 3, 1, 2, 0, 1},
		"huge record":    {22, 3, 1, 0xff, 0xff, 1, 2, 3},
		"huge handshake": append([]byte{22, 3, 1, 0x40, 0, 1, 0xff, 0xff, 0xff}, make([]byte, 16379)...),
		"http":           []byte("GET / HTTP/1.1\r\n\r\n"),
		"alert":          {21, 3, 1, 0, 2, 2, 40},
		"zeros":          make([]byte, 4096),
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			defer cancel()
			near, far := net.Pipe()
			defer far.Close()
			go io.Copy(io.Discard, far)
			go far.Write(say)
			began := time.Now()
			c, err := Server(ctx, near, id.Server())
			var typed *Error
			if c != nil || !errors.As(err, &typed) {
				t.Fatalf("got %v, %v", c, err)
			}
			if took := time.Since(began); took > time.Second {
				t.Errorf("took %v", took)
			}
		})
	}
}

func FuzzServer(f *testing.F) {
	a, _, err := OpenAuthority(f.TempDir())
	if err != nil {
		f.Fatal(err)
	}
	c, err := a.Issue("engine", nil)
	if err != nil {
		f.Fatal(err)
	}
	id, err := Load(c.Files, nil)
	if err != nil {
		f.Fatal(err)
	}
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Add([]byte{22, 3, 1, 0, 5, 1, 0, 0, 1, 0})
	f.Fuzz(func(t *testing.T, say []byte) {
		near, far := net.Pipe()
		go io.Copy(io.Discard, far)
		go func() {
			far.Write(say)
			far.Close()
		}()
		if _, err := Server(t.Context(), near, id.Server()); err == nil {
			t.Fatal("let in without a certificate")
		}
		far.Close()
	})
}

func TestPeerName(t *testing.T) {
	a := authority(t)
	server, client := load(t, issue(t, a, "coordinator")), load(t, issue(t, a, "engine-7"))
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	names := make(chan string, 1)
	go func() {
		nc, _ := ln.Accept()
		c, err := Server(context.Background(), nc, server.Server())
		if err != nil {
			names <- err.Error()
			return
		}
		defer c.Close()
		names <- c.PeerName()
	}()
	nc, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	c, err := Client(t.Context(), nc, client.Client(), ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if a, b := c.PeerName(), <-names; a != "coordinator" || b != "engine-7" {
		t.Errorf("got %q and %q", a, b)
	}
}

// Renewed files count without a restart; half-written ones do not.
func TestRenewal(t *testing.T) {
	a := authority(t)
	files := issue(t, a, "engine")
	var log bytes.Buffer
	id, err := Load(files, slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	first := id.current().Leaf
	look := func() *x509.Certificate {
		id.checked = time.Time{}
		return id.current().Leaf
	}
	key, err := os.ReadFile(files.Key)
	if err != nil {
		t.Fatal(err)
	}
	issue(t, a, "engine", "gpu1")
	whole, err := os.ReadFile(files.Key)
	if err != nil {
		t.Fatal(err)
	}
	// The new certificate with the old key.
	if err := os.WriteFile(files.Key, append(key, '\n'), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := look(); !got.Equal(first) {
		t.Error("a pair that does not match was taken")
	}
	if !strings.Contains(log.String(), "the old one stays") {
		t.Errorf("log: %s", &log)
	}
	if err := os.WriteFile(files.Key, whole, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := look(); got.Equal(first) || !strings.Contains(names(got), "gpu1") {
		t.Errorf("still for %s", names(got))
	}
	if id.cert == nil || look() != id.cert.Leaf {
		t.Error("read again without a change")
	}
	if err := os.Remove(files.Cert); err != nil {
		t.Fatal(err)
	}
	if look() == nil {
		t.Error("forgot its certificate with its file")
	}
}

func TestLoadErrors(t *testing.T) {
	a, b := authority(t), authority(t)
	ours, theirs := issue(t, a, "engine"), issue(t, b, "engine")
	other := issue(t, a, "other")
	garbage := filepath.Join(t.TempDir(), "garbage")
	if err := os.WriteFile(garbage, []byte("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	old := filepath.Join(t.TempDir(), "old.crt")
	cert := forge(t, a, expired)
	if err := replaceFile(old, 0o644, "CERTIFICATE", cert.Certificate[0]); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		files Files
		says  []string
	}{
		"no authority":      {Files{garbage + "x", ours.Cert, ours.Key}, []string{"--tls-ca", garbage + "x", "no such file"}},
		"garbage":           {Files{garbage, ours.Cert, ours.Key}, []string{"--tls-ca", "no certificate"}},
		"key for authority": {Files{ours.Key, ours.Cert, ours.Key}, []string{"--tls-ca", "no certificate"}},
		"no certificate":    {Files{ours.CA, garbage + "x", ours.Key}, []string{"--tls-cert", garbage + "x"}},
		"no key":            {Files{ours.CA, ours.Cert, garbage + "x"}, []string{"--tls-key", garbage + "x"}},
		"another's key":     {Files{ours.CA, ours.Cert, other.Key}, []string{"--tls-cert, --tls-key", "does not match"}},
		"another authority": {Files{theirs.CA, ours.Cert, ours.Key}, []string{"--tls-cert", "not signed by --tls-ca", theirs.CA}},
		"expired":           {Files{ours.CA, old, filepath.Join(filepath.Dir(ours.CA), "forged.key")}, []string{"--tls-cert", "expired", "baton certs"}},
	} {
		_, err := Load(c.files, nil)
		var typed *FileError
		if !errors.As(err, &typed) {
			t.Errorf("%s: got %v", name, err)
			continue
		}
		for _, words := range c.says {
			if !strings.Contains(err.Error(), words) {
				t.Errorf("%s: %v does not say %q", name, err, words)
			}
		}
	}
	var log bytes.Buffer
	if err := os.Chmod(ours.Key, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(ours, slog.New(slog.NewTextHandler(&log, nil))); err != nil || !strings.Contains(log.String(), "chmod 600") {
		t.Errorf("a readable key: %v, log %q", err, &log)
	}
}

func TestNobody(t *testing.T) {
	var id *Identity
	if id.Server() != nil || id.Client() != nil || id.HTTPServer() != nil || id.HTTPSelf() != nil {
		t.Error("a process without TLS has a configuration")
	}
}

func TestHTTPSelf(t *testing.T) {
	a := authority(t)
	id, other := load(t, issue(t, a, "frontend")), load(t, issue(t, a, "other"))
	if serverErr, err := meet(t, id.HTTPServer(), id.HTTPSelf()); serverErr != nil || err != nil {
		t.Errorf("itself: %v, %v", serverErr, err)
	}
	if _, err := meet(t, other.HTTPServer(), id.HTTPSelf()); err == nil || !strings.Contains(err.Error(), "another server") {
		t.Errorf("another: %v", err)
	}
}

func TestIssue(t *testing.T) {
	a := authority(t)
	again, created, err := OpenAuthority(a.dir)
	if err != nil || created || !again.Cert.Equal(a.Cert) {
		t.Fatalf("opened again: %v, %v", created, err)
	}
	c, err := again.Issue("engine", []string{"gpu1", "*.pods.example.com", "10.1.2.3", "fd00::1"})
	if err != nil {
		t.Fatal(err)
	}
	for _, host := range []string{"localhost", "127.0.0.1", "::1", "gpu1", "a.pods.example.com", "10.1.2.3", "fd00::1"} {
		if err := c.Leaf.VerifyHostname(host); err != nil {
			t.Error(err)
		}
	}
	if c.Leaf.VerifyHostname("gpu2") == nil || c.Leaf.IsCA {
		t.Error("good for more than it should")
	}
	if life := time.Until(c.Leaf.NotAfter); life > CertificateLife || life < CertificateLife-time.Minute {
		t.Errorf("lasts %v", life)
	}
	if life := time.Until(a.Cert.NotAfter); life > AuthorityLife || life < AuthorityLife-time.Minute {
		t.Errorf("the authority lasts %v", life)
	}
	entries, err := os.ReadDir(a.dir)
	if err != nil {
		t.Fatal(err)
	}
	modes := map[string]os.FileMode{"ca.crt": 0o644, "ca.key": 0o600, "engine.crt": 0o644, "engine.key": 0o600}
	if len(entries) != len(modes) {
		t.Errorf("files: %v", entries)
	}
	for _, e := range entries {
		if info, err := e.Info(); err != nil || info.Mode().Perm() != modes[e.Name()] {
			t.Errorf("%s: %v, %v", e.Name(), info.Mode(), err)
		}
	}
	if info, err := os.Stat(a.dir); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("folder: %v, %v", info.Mode(), err)
	}
	for _, name := range []string{"", "ca", "../x", "a/b", ".hidden", "-x", "a b"} {
		var typed *NameError
		if _, err := a.Issue(name, nil); !errors.As(err, &typed) {
			t.Errorf("name %q: %v", name, err)
		}
	}
	for _, host := range []string{"", "a b", "gpu1:8000", "[::1]:80", "https://x", "a..b", "*", "x.*.y", "-a", strings.Repeat("a", 64), strings.Repeat("a.", 127) + "a"} {
		var typed *NameError
		if _, err := a.Issue("x", []string{host}); !errors.As(err, &typed) || typed.What != "host" {
			t.Errorf("host %q: %v", host, err)
		}
	}
}

// What is in the folder and is not the authority's own is never overwritten.
func TestForeignFiles(t *testing.T) {
	put := func(t *testing.T, path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	a, b := authority(t), authority(t)
	theirs := issue(t, b, "engine")
	cert, err := os.ReadFile(theirs.Cert)
	if err != nil {
		t.Fatal(err)
	}
	put(t, a.path("engine", ".crt"), string(cert))
	put(t, a.path("lonely", ".key"), "precious")
	put(t, a.path("odd", ".crt"), "notes")
	for name, says := range map[string]string{"engine": "is not of the authority", "lonely": "without its certificate", "odd": "no certificate in it"} {
		if _, err := a.Issue(name, nil); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", name, err, says)
		}
	}
	for name, c := range map[string]struct {
		spoil func(t *testing.T, a *Authority)
		says  string
	}{
		"no key":         {func(t *testing.T, a *Authority) { os.Remove(a.path("ca", ".key")) }, "is missing"},
		"no certificate": {func(t *testing.T, a *Authority) { os.Remove(a.path("ca", ".crt")) }, "bring the certificate back"},
		"garbage":        {func(t *testing.T, a *Authority) { put(t, a.path("ca", ".crt"), "x") }, "no certificate in it"},
		"garbage key":    {func(t *testing.T, a *Authority) { put(t, a.path("ca", ".key"), "x") }, "no private key in it"},
		"another's key":  {func(t *testing.T, a *Authority) { a.key = b.key; a.write("ca", a.Cert.Raw, b.key) }, "does not belong"},
		"a leaf": {func(t *testing.T, a *Authority) {
			c := issue(t, a, "x")
			os.Rename(c.Cert, a.path("ca", ".crt"))
			os.Rename(c.Key, a.path("ca", ".key"))
		}, "not the certificate of an authority"},
	} {
		a := authority(t)
		c.spoil(t, a)
		if _, _, err := OpenAuthority(a.dir); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want %q", name, err, c.says)
		}
	}
}
