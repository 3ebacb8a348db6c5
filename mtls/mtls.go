// Package mtls makes the certificates of a fleet and the TLS connections between its processes: TLS 1.3
// only, both sides show a certificate, and each checks that the other's is signed by the fleet's
// authority. It explains what goes wrong in words that name the flag to change.
//
// It knows nothing of what runs over the connections. A process holds one Identity; its files are read
// again when they change, so that a renewed certificate needs no restart (another authority does).
package mtls

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"
)

// Files are the paths of PEM files: certificates of authorities, a certificate (and what leads from it to
// an authority), its private key.
type Files struct{ CA, Cert, Key string }

// Identity is who a process is to others, and whom it trusts. A nil *Identity is a process without TLS.
type Identity struct {
	files Files
	log   *slog.Logger
	roots *x509.CertPool // never nil: without roots the system's would count

	mu      sync.Mutex
	cert    *tls.Certificate
	stamp   stamp // of the files that cert was read from
	checked time.Time
}

// checkInterval is how often the files are looked at, at most.
const checkInterval = time.Second

// FileError is a file that cannot serve as what its flag says.
type FileError struct {
	Flag, Path string
	Err        error
}

func (e *FileError) Error() string { return fmt.Sprintf("%s %s: %v", e.Flag, e.Path, e.Err) }

// Unwrap returns the reason.
func (e *FileError) Unwrap() error { return e.Err }

// Load reads an identity. Without Files.CA it is good for HTTP servers only: nobody is trusted. Its errors
// are FileErrors. The log (nil for none) gets a line when a key is readable by others, when the
// certificate ends soon, and when the files were read again.
func Load(files Files, log *slog.Logger) (*Identity, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	id := &Identity{files: files, log: log, roots: x509.NewCertPool()}
	if files.CA != "" {
		pem, err := os.ReadFile(files.CA)
		if err == nil && !id.roots.AppendCertsFromPEM(pem) {
			err = errors.New("no certificate in it (PEM)")
		}
		if err != nil {
			return nil, &FileError{"--tls-ca", files.CA, plain(err)}
		}
	}
	var err error
	if id.stamp, err = files.stat(); err != nil {
		return nil, err
	}
	if id.cert, err = id.load(); err != nil {
		return nil, err
	}
	id.checked = time.Now()
	if info, err := os.Stat(files.Key); err == nil && info.Mode().Perm()&0o077 != 0 {
		log.Warn("other users can read the private key: chmod 600 it", "key", files.Key, "mode", info.Mode().Perm())
	}
	return id, nil
}

// load reads the pair and checks it against the authorities.
func (id *Identity) load() (*tls.Certificate, error) {
	cert, err := tls.LoadX509KeyPair(id.files.Cert, id.files.Key)
	if err != nil {
		return nil, &FileError{"--tls-cert, --tls-key", id.files.Cert + ", " + id.files.Key, plain(err)}
	}
	now := time.Now()
	switch leaf := cert.Leaf; {
	case now.After(leaf.NotAfter):
		return nil, &FileError{"--tls-cert", id.files.Cert, fmt.Errorf("it expired at %v: renew it with `baton certs`", leaf.NotAfter)}
	case now.Add(soon).After(leaf.NotAfter):
		id.log.Warn("the certificate expires soon: renew it with `baton certs`", "cert", id.files.Cert, "at", leaf.NotAfter)
	}
	if id.files.CA == "" {
		return &cert, nil
	}
	between := x509.NewCertPool()
	for _, der := range cert.Certificate[1:] {
		if c, err := x509.ParseCertificate(der); err == nil {
			between.AddCert(c)
		}
	}
	_, err = cert.Leaf.Verify(x509.VerifyOptions{Roots: id.roots, Intermediates: between, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	if err != nil {
		problem, _ := explainCertificate(err)
		return nil, &FileError{"--tls-cert", id.files.Cert, fmt.Errorf("%s (--tls-ca is %s)", problem, id.files.CA)}
	}
	return &cert, nil
}

// soon is how long before its end a certificate is worth a warning.
const soon = 14 * 24 * time.Hour

// plain drops the operation and path that a FileError says anyway.
func plain(err error) error {
	var path *os.PathError
	if errors.As(err, &path) {
		return path.Err
	}
	return err
}

// stamp tells whether files changed.
type stamp [2]struct {
	size     int64
	modified time.Time
}

func (f Files) stat() (s stamp, err error) {
	for i, path := range []string{f.Cert, f.Key} {
		info, err := os.Stat(path)
		if err != nil {
			return s, &FileError{[]string{"--tls-cert", "--tls-key"}[i], path, plain(err)}
		}
		s[i].size, s[i].modified = info.Size(), info.ModTime()
	}
	return s, nil
}

// current is the certificate to show, read again if its files changed. While the new ones are no good,
// as between the writing of the one and the other, the old one stays.
func (id *Identity) current() *tls.Certificate {
	id.mu.Lock()
	defer id.mu.Unlock()
	if time.Since(id.checked) < checkInterval {
		return id.cert
	}
	id.checked = time.Now()
	stamp, err := id.files.stat()
	if err == nil && stamp == id.stamp {
		return id.cert
	}
	var cert *tls.Certificate
	if err == nil {
		cert, err = id.load()
	}
	if err != nil {
		id.log.Warn("the changed certificate is no good; the old one stays", "error", err)
		return id.cert
	}
	id.log.Info("certificate read again", "cert", id.files.Cert, "until", cert.Leaf.NotAfter)
	id.cert, id.stamp = cert, stamp
	return cert
}

// Covers fails if peers that call this process by host would not accept its certificate.
func (id *Identity) Covers(host string) error {
	leaf := id.current().Leaf
	if leaf.VerifyHostname(host) == nil {
		return nil
	}
	return fmt.Errorf("the certificate %s is for %s, not for %s: make one with `baton certs --hosts %s`", id.files.Cert, names(leaf), host, host)
}

// Server is the configuration of those who accept peers. It is nil for a nil Identity.
func (id *Identity) Server() *tls.Config {
	if id == nil {
		return nil
	}
	c := id.HTTPServer()
	c.ClientAuth, c.ClientCAs = tls.RequireAndVerifyClientCert, id.roots
	return c
}

// Client is the configuration of those who call peers. It is nil for a nil Identity.
func (id *Identity) Client() *tls.Config {
	if id == nil {
		return nil
	}
	c := base()
	c.RootCAs = id.roots
	// Unlike Certificates, this shows the certificate to servers of another authority too, whose
	// refusal then says so.
	c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return id.current(), nil }
	return c
}

// HTTPServer is the configuration of a server whose clients show no certificate. It is nil for a nil
// Identity.
func (id *Identity) HTTPServer() *tls.Config {
	if id == nil {
		return nil
	}
	c := base()
	c.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return id.current(), nil }
	c.NextProtos = []string{"http/1.1"}
	return c
}

// HTTPSelf is the configuration of a client that calls this process's own HTTP server, whatever its
// address: it wants this very certificate.
func (id *Identity) HTTPSelf() *tls.Config {
	if id == nil {
		return nil
	}
	c := base()
	c.InsecureSkipVerify = true // replaced by the comparison
	c.VerifyConnection = func(s tls.ConnectionState) error {
		if !s.PeerCertificates[0].Equal(id.current().Leaf) {
			return errors.New("another server answers at this process's address")
		}
		return nil
	}
	return c
}

func base() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		// Connections last: resumption would save nothing and keep secrets longer.
		SessionTicketsDisabled: true,
		// Throughput counts, not the first bytes of a page.
		DynamicRecordSizingDisabled: true,
	}
}
