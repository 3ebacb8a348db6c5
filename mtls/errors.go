package mtls

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"reflect"
	"strings"
	"syscall"
	"time"
)

// Error is a connection that did not come about because of TLS.
type Error struct {
	Peer      string // the other side's address
	Problem   string // what is wrong and what to do about it
	Permanent bool   // trying again will not help before somebody changes certificates or flags
	Err       error  // of crypto/tls, or of the connection
}

func (e *Error) Error() string { return fmt.Sprintf("TLS with %s: %s (%v)", e.Peer, e.Problem, e.Err) }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// explain says what a failed handshake means. host is the name that the peer was called by, empty for
// a client that called.
func explain(peer, host string, err error) error {
	e := &Error{Peer: peer, Err: err}
	if problem, ok := explainCertificate(err); ok {
		e.Problem, e.Permanent = problem, true
		return e
	}
	if problem, permanent, ok := explainAlert(err); ok {
		e.Problem, e.Permanent = problem, permanent
		return e
	}
	var header tls.RecordHeaderError
	switch {
	case errors.Is(err, errNoTLS) || errors.As(err, &header):
		e.Problem, e.Permanent = "it does not use TLS and this side does: give it --tls-ca, --tls-cert and --tls-key", true
	case host == "" && strings.Contains(err.Error(), "didn't provide a certificate"): // crypto/tls has no type for it
		e.Problem, e.Permanent = "it shows no certificate: give it --tls-ca, --tls-cert and --tls-key", true
	case timedOut(err):
		e.Problem = "no answer in time"
	case errors.Is(err, context.Canceled):
		e.Problem = "given up"
	case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE):
		e.Problem = "it ended the connection in the middle of the handshake"
		if host != "" {
			e.Problem += ": either it stopped, or it does not use TLS (give it --tls-ca, --tls-cert and --tls-key)"
		}
	default:
		e.Problem = "the handshake failed"
	}
	return e
}

const sameAuthority = "use certificates that one run of `baton certs` made, or its --tls-ca, on both sides"

// explainCertificate says what is wrong with a peer's certificate, or this side's own.
func explainCertificate(err error) (problem string, ok bool) {
	var unknown x509.UnknownAuthorityError
	var invalid x509.CertificateInvalidError
	var host x509.HostnameError
	switch {
	case errors.As(err, &unknown):
		return "its certificate is not signed by --tls-ca: " + sameAuthority, true
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired && invalid.Cert != nil && time.Now().Before(invalid.Cert.NotBefore):
		return fmt.Sprintf("its certificate is not valid before %v: check both clocks", invalid.Cert.NotBefore), true
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired && invalid.Cert != nil:
		return fmt.Sprintf("its certificate expired at %v: renew it with `baton certs`", invalid.Cert.NotAfter), true
	case errors.As(err, &invalid) && invalid.Reason == x509.IncompatibleUsage:
		return "its certificate is not made for this use: it needs both server and client authentication", true
	case errors.As(err, &invalid):
		return "its certificate is not valid", true
	case errors.As(err, &host):
		return fmt.Sprintf("its certificate is for %s, not for %s: make one with `baton certs --hosts %s`, or use an address that it is for",
			names(host.Certificate), host.Host, host.Host), true
	}
	return "", false
}

// hosts lists what a certificate is for.
func hosts(c *x509.Certificate) []string {
	list := append([]string(nil), c.DNSNames...)
	for _, ip := range c.IPAddresses {
		list = append(list, ip.String())
	}
	return list
}

// names is hosts for people.
func names(c *x509.Certificate) string {
	return cmp.Or(strings.Join(hosts(c), ", "), "no host")
}

// Alerts of RFC 8446, section 6.2, that one side sends about the other's certificate.
const (
	alertBadCertificate      = 42
	alertUnsupported         = 43
	alertRevoked             = 44
	alertExpired             = 45
	alertUnknown             = 46
	alertUnknownCA           = 48
	alertProtocolVersion     = 70
	alertCertificateRequired = 116
)

// explainAlert says what the other side's alert means.
func explainAlert(err error) (problem string, permanent, ok bool) {
	var op *net.OpError
	if !errors.As(err, &op) || op.Op != "remote error" {
		return "", false, false
	}
	// crypto/tls keeps the alert's type to itself, but it is the number of the RFC.
	v := reflect.ValueOf(op.Err)
	if v.Kind() != reflect.Uint8 {
		return "it refused the connection", false, true
	}
	switch v.Uint() {
	case alertUnknownCA:
		return "this side's certificate is not signed by the --tls-ca of the other: " + sameAuthority, true, true
	case alertExpired:
		return "this side's certificate has expired or is not valid yet: renew it with `baton certs`, and check both clocks", true, true
	case alertCertificateRequired:
		return "it wants a certificate and this side shows none: give --tls-ca, --tls-cert and --tls-key", true, true
	case alertBadCertificate, alertUnsupported, alertRevoked, alertUnknown:
		return "it does not accept this side's certificate, and its own error says why; " + sameAuthority, true, true
	case alertProtocolVersion:
		return "it speaks no TLS 1.3", true, true
	}
	return "it refused the connection", false, true
}
