package mtls

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// How long certificates last. An authority's are replaced by hand, so its life is long.
const (
	AuthorityLife   = 10 * 365 * 24 * time.Hour
	CertificateLife = 365 * 24 * time.Hour
)

// backdate forgives clocks that run behind.
const backdate = time.Hour

// Authority is a local certificate authority, which lives in a folder as ca.crt and ca.key.
type Authority struct {
	// Cert is its own certificate.
	Cert *x509.Certificate
	dir  string
	key  crypto.Signer
}

// Issued is a certificate that an Authority made.
type Issued struct {
	Files
	Leaf *x509.Certificate
}

// Hosts are the names and addresses that the certificate is for.
func (i *Issued) Hosts() []string { return hosts(i.Leaf) }

// OpenAuthority opens the authority of a folder, or makes both, and reports whether it is new. Errors
// name the file.
func OpenAuthority(dir string) (a *Authority, created bool, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, false, err
	}
	a = &Authority{dir: dir}
	if a.Cert, err = readCertificate(a.path("ca", ".crt")); errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Lstat(a.path("ca", ".key")); !errors.Is(err, fs.ErrNotExist) {
			return nil, false, fmt.Errorf("%s is there and ca.crt is not: bring the certificate back or take the key away", a.path("ca", ".key"))
		}
		return a, true, a.create()
	}
	if err != nil {
		return nil, false, err
	}
	if a.key, err = readKey(a.path("ca", ".key")); errors.Is(err, fs.ErrNotExist) {
		return nil, false, fmt.Errorf("%s is missing: without it no certificate can be added; bring it back or use another folder", a.path("ca", ".key"))
	}
	if err != nil {
		return nil, false, err
	}
	public, ok := a.Cert.PublicKey.(interface{ Equal(crypto.PublicKey) bool })
	switch {
	case !a.Cert.IsCA:
		return nil, false, fmt.Errorf("%s is not the certificate of an authority", a.path("ca", ".crt"))
	case !ok || !public.Equal(a.key.Public()):
		return nil, false, fmt.Errorf("%s does not belong to ca.crt beside it", a.path("ca", ".key"))
	case time.Now().After(a.Cert.NotAfter):
		return nil, false, fmt.Errorf("%s expired at %v: make new certificates in another folder", a.path("ca", ".crt"), a.Cert.NotAfter)
	}
	return a, false, nil
}

func (a *Authority) path(name, ext string) string { return filepath.Join(a.dir, name+ext) }

func (a *Authority) create() (err error) {
	if a.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		return err
	}
	var tag [4]byte
	rand.Read(tag[:])
	template := &x509.Certificate{
		// The tag tells authorities apart that people confuse.
		Subject:   pkix.Name{CommonName: "Baton authority " + hex.EncodeToString(tag[:])},
		NotBefore: time.Now().Add(-backdate), NotAfter: time.Now().Add(AuthorityLife),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, a.key.Public(), a.key)
	if err != nil {
		return err
	}
	if a.Cert, err = x509.ParseCertificate(der); err != nil {
		return err
	}
	return a.write("ca", der, a.key)
}

// NameError is a name or host that no certificate can be made for.
type NameError struct{ What, Name, Reason string }

func (e *NameError) Error() string { return fmt.Sprintf("%s %q: %s", e.What, e.Name, e.Reason) }

// Issue makes a certificate for servers and clients, valid for the hosts given (names, *.names, IP
// addresses) and for this host's loopback, in NAME.crt and NAME.key. It replaces those of an earlier
// call, and refuses to replace anything that is not this authority's.
func (a *Authority) Issue(name string, hosts []string) (*Issued, error) {
	if name == "" || name == "ca" || strings.Trim(name, fileLetters) != "" || name[0] == '.' || name[0] == '-' {
		return nil, &NameError{"name", name, "want letters, digits, '.', '-' and '_', and not \"ca\""}
	}
	template := &x509.Certificate{
		Subject:   pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-backdate), NotAfter: time.Now().Add(CertificateLife),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	if template.NotAfter.After(a.Cert.NotAfter) {
		template.NotAfter = a.Cert.NotAfter
	}
	for _, host := range append([]string{"localhost", "127.0.0.1", "::1"}, hosts...) {
		if ip := net.ParseIP(host); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else if err := checkHost(host); err != nil {
			return nil, err
		} else {
			template.DNSNames = append(template.DNSNames, host)
		}
	}
	files := Files{CA: a.path("ca", ".crt"), Cert: a.path(name, ".crt"), Key: a.path(name, ".key")}
	if err := a.mayReplace(files); err != nil {
		return nil, err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.Cert, key.Public(), a.key)
	if err != nil {
		return nil, err
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &Issued{files, leaf}, a.write(name, der, key)
}

const fileLetters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_"

// checkHost accepts what a certificate can name: a host name, whose first label may be a star.
func checkHost(host string) error {
	bad := func(reason string) error { return &NameError{"host", host, reason} }
	if _, port, err := net.SplitHostPort(host); err == nil && port != "" {
		return bad("leave the port out")
	}
	if len(host) > 253 {
		return bad("longer than a host name can be")
	}
	for i, label := range strings.Split(host, ".") {
		if label == "*" && i == 0 && strings.Contains(host, ".") {
			continue
		}
		if label == "" || len(label) > 63 || strings.Trim(label, fileLetters) != "" || label[0] == '-' {
			return bad("want a host name, *.a.domain, or an IP address")
		}
	}
	return nil
}

// mayReplace fails if files are there that this authority did not make.
func (a *Authority) mayReplace(files Files) error {
	old, err := readCertificate(files.Cert)
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Lstat(files.Key); !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%s is there without its certificate: take it away first", files.Key)
		}
		return nil
	}
	if err != nil {
		return err
	}
	if old.CheckSignatureFrom(a.Cert) != nil {
		return fmt.Errorf("%s is not of the authority in %s: take it away first, or use another folder", files.Cert, a.dir)
	}
	return nil
}

// write puts a pair into the folder, the key first: whoever reads a pair that does not match keeps the old.
func (a *Authority) write(name string, der []byte, key crypto.Signer) error {
	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	if err := replaceFile(a.path(name, ".key"), 0o600, "PRIVATE KEY", pkcs8); err != nil {
		return err
	}
	return replaceFile(a.path(name, ".crt"), 0o644, "CERTIFICATE", der)
}

// replaceFile writes a PEM file that is whole at any time, and never readable by more than mode allows.
func replaceFile(path string, mode os.FileMode, kind string, der []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".new-*") // 0600
	if err != nil {
		return err
	}
	err = errors.Join(
		pem.Encode(f, &pem.Block{Type: kind, Bytes: der}),
		f.Chmod(mode), f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return err
}

func readCertificate(path string) (*x509.Certificate, error) {
	der, err := readPEM(path, "CERTIFICATE")
	if err != nil {
		return nil, err
	}
	c, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return c, nil
}

func readKey(path string) (crypto.Signer, error) {
	der, err := readPEM(path, "PRIVATE KEY")
	if err != nil {
		return nil, err
	}
	k, err := x509.ParsePKCS8PrivateKey(der)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	signer, ok := k.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("%s: a %T cannot sign", path, k)
	}
	return signer, nil
}

// readPEM returns the first block of a file, which must be of a kind.
func readPEM(path, kind string) ([]byte, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(bytes.TrimSpace(text))
	if block == nil || block.Type != kind {
		return nil, fmt.Errorf("%s: no %s in it (PEM)", path, strings.ToLower(kind))
	}
	return block.Bytes, nil
}
