package main

import (
	"crypto/rand"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"

	"baton/frontend"
	"baton/mtls"
	"baton/wire"
)

// certFlags are the TLS flags of a process whose only port is HTTP.
type certFlags struct {
	TLSCert  string `name:"tls-cert" placeholder:"FILE" help:"This process's certificate (PEM). With it, every port and connection of the process uses TLS."`
	TLSKey   string `name:"tls-key" placeholder:"FILE" help:"The private key of --tls-cert (PEM)."`
	Insecure bool   `help:"Allow connections beyond this host without TLS."`
}

// tlsFlags are those of a process that speaks with others of the fleet.
type tlsFlags struct {
	TLSCA string `name:"tls-ca" placeholder:"FILE" help:"Certificate of the authority that signs the fleet's certificates (PEM). All three files come from \"baton certs\"."`
	certFlags
	PlainHTTP bool `name:"plain-http" help:"HTTP ports (of clients, of metrics) without TLS all the same: something in front of them ends it."`
}

// security is what the TLS flags mean for a process.
type security struct {
	id        *mtls.Identity // nil without TLS
	files     string         // the flags that would give it one
	insecure  bool
	plainHTTP bool
}

func (f certFlags) secure(log *slog.Logger) (*security, error) {
	s := &security{insecure: f.Insecure, files: "--tls-cert certs/frontend.crt --tls-key certs/frontend.key"}
	if f.TLSCert == "" && f.TLSKey == "" {
		return s, nil
	}
	if f.TLSCert == "" || f.TLSKey == "" {
		return nil, fmt.Errorf("--tls-cert and --tls-key belong together, and one of them is missing")
	}
	var err error
	s.id, err = mtls.Load(mtls.Files{Cert: f.TLSCert, Key: f.TLSKey}, log)
	return s, err
}

func (f tlsFlags) secure(role string, log *slog.Logger) (*security, error) {
	s := &security{insecure: f.Insecure, plainHTTP: f.PlainHTTP}
	s.files = fmt.Sprintf("--tls-ca certs/ca.crt --tls-cert certs/%s.crt --tls-key certs/%s.key", role, role)
	files := mtls.Files{CA: f.TLSCA, Cert: f.TLSCert, Key: f.TLSKey}
	if files == (mtls.Files{}) {
		return s, nil
	}
	for flag, path := range map[string]string{"--tls-ca": files.CA, "--tls-cert": files.Cert, "--tls-key": files.Key} {
		if path == "" {
			return nil, fmt.Errorf("--tls-ca, --tls-cert and --tls-key belong together, and %s is missing", flag)
		}
	}
	var err error
	s.id, err = mtls.Load(files, log)
	return s, err
}

// plainError is an address that wants TLS where there is none.
type plainError struct{ flag, addr, host, files string }

func (e *plainError) Error() string {
	return fmt.Sprintf(`%s %s reaches beyond this host, so it takes TLS. Make certificates with
  baton certs --dir certs --hosts %s
and add
  %s
or allow connections without TLS by --insecure`, e.flag, e.addr, e.host, e.files)
}

// checkAddress fails if a flag's value is not HOST:PORT.
func checkAddress(flag, addr string) error {
	_, port, err := net.SplitHostPort(addr)
	if err == nil {
		_, err = net.LookupPort("tcp", port)
	}
	if err != nil {
		return fmt.Errorf("%s %s is not an address: write HOST:PORT, such as 127.0.0.1:8000 or [::1]:8000", flag, addr)
	}
	return nil
}

// reach checks the address of a flag that this process connects to.
func (s *security) reach(flag, addr string) error {
	if err := checkAddress(flag, addr); err != nil {
		return err
	}
	return s.permit(flag, addr)
}

// permit fails if a flag's address goes beyond loopback and nothing secures it.
func (s *security) permit(flag, addr string) error {
	if s.id != nil || s.insecure || isLoopback(addr) {
		return nil
	}
	host := hostOf(addr)
	if ip := net.ParseIP(host); host == "" || ip.IsUnspecified() {
		host = "HOST"
	}
	return &plainError{flag, addr, host, s.files}
}

func hostOf(addr string) string {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return addr
	}
	return host
}

// isLoopback reports whether an address can only be of this host. Names other than localhost are not
// looked up: what they mean may change.
func isLoopback(addr string) bool {
	host, _, _ := strings.Cut(hostOf(addr), "%")
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// listen opens the port of a flag. Whoever accepts there does TLS.
func (s *security) listen(flag, addr string) (net.Listener, error) {
	if err := s.reach(flag, addr); err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", flag, addr, err)
	}
	return l, nil
}

// listenHTTP opens an HTTP port and says how it is reached.
func (s *security) listenHTTP(flag, addr string) (l net.Listener, url string, err error) {
	if s.plainHTTP {
		s = &security{insecure: true}
	}
	if l, err = s.listen(flag, addr); err != nil {
		return nil, "", err
	}
	if s.id == nil {
		return l, "http://" + l.Addr().String(), nil
	}
	return tls.NewListener(l, s.id.HTTPServer()), "https://" + l.Addr().String(), nil
}

// server and client are the options of connections that are accepted and made.
func (s *security) server() wire.Options { return wire.Options{TLS: s.id.Server()} }
func (s *security) client() wire.Options { return wire.Options{TLS: s.id.Client()} }

// transfer checks that peers can reach this process's KV at host under the certificate it has.
func (s *security) transfer(flag, host string) error {
	if _, _, err := net.SplitHostPort(host); err == nil || host == "" {
		return fmt.Errorf("%s %s is not a host: write a name or an IP address, without a port", flag, host)
	}
	if s.id == nil {
		return s.permit(flag, host)
	}
	if err := s.id.Covers(host); err != nil {
		return fmt.Errorf("%s %s: %w", flag, host, err)
	}
	return nil
}

// selfClient is how a process calls its own HTTP port. The zero value suits one that asks for nothing.
type selfClient struct {
	client *http.Client
	key    string // of the API
}

func (s *security) selfClient(key string) selfClient {
	return selfClient{&http.Client{Transport: &http.Transport{TLSClientConfig: s.id.HTTPSelf()}}, key}
}

// keyFlags say who may use the HTTP port.
type keyFlags struct {
	APIKeyFile string `name:"api-key-file" placeholder:"FILE" help:"File of API keys, one a line, # for comments. Clients then need one (Authorization: Bearer KEY), except for /health and /metrics."`
}

func (f keyFlags) keys() (frontend.APIKeys, error) {
	if f.APIKeyFile == "" {
		return frontend.APIKeys{}, nil
	}
	keys, err := frontend.ReadAPIKeys(f.APIKeyFile)
	if err != nil {
		err = fmt.Errorf("--api-key-file: %w", err)
	}
	return keys, err
}

// ownKey adds a key that only this process knows, for the question that it asks itself. It is empty when
// no key is needed.
func ownKey(keys *frontend.APIKeys) string {
	if !keys.Required() {
		return ""
	}
	key := rand.Text()
	keys.Add(key)
	return key
}
