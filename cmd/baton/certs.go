package main

import (
	"cmp"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"baton/mtls"
)

// certsCmd makes what mutual TLS takes.
type certsCmd struct {
	Dir   string   `default:"certs" placeholder:"DIR" help:"Folder of the authority and its certificates; made if it is not there. Default: ${default}."`
	Hosts []string `placeholder:"HOST,..." help:"Hosts that the certificates are for, beside loopback: names, *.domain, IP addresses."`
	Names []string `default:"coordinator,engine,frontend" placeholder:"NAME,..." help:"Certificates to make: one a role, or one a host under names of your choice. Default: ${default}."`
}

func (c *certsCmd) Run(env *environment) error {
	authority, created, err := mtls.OpenAuthority(c.Dir)
	if err != nil {
		return fmt.Errorf("--dir: %w", err)
	}
	var list []*mtls.Issued
	for _, name := range c.Names {
		made, err := authority.Issue(name, c.Hosts)
		if err != nil {
			return err
		}
		list = append(list, made)
	}
	day := func(t time.Time) string { return t.Format(time.DateOnly) }
	what := "the authority was there already"
	if created {
		what = "the new authority"
	}
	fmt.Fprintf(env.stdout, "%-28s %s, until %s\n", filepath.Join(c.Dir, "ca.crt"), what, day(authority.Cert.NotAfter))
	fmt.Fprintf(env.stdout, "%-28s its key: whoever has it can join the fleet; no process needs it\n", filepath.Join(c.Dir, "ca.key"))
	for _, made := range list {
		fmt.Fprintf(env.stdout, "%-28s for %s, until %s\n", made.Cert, strings.Join(made.Hosts(), ", "), day(made.Leaf.NotAfter))
	}
	fmt.Fprint(env.stdout, "\nEach process gets ca.crt and its own pair, of which the .key stays secret:\n\n")
	for i, made := range list {
		role := cmp.Or(map[string]string{"coordinator": "coordinator", "engine": "engine", "frontend": "frontend"}[c.Names[i]], "...")
		fmt.Fprintf(env.stdout, "  baton %s --tls-ca %s --tls-cert %s --tls-key %s\n", role, made.CA, made.Cert, made.Key)
	}
	fmt.Fprintf(env.stdout, "  curl --cacert %s https://...\n\nRun it again, with all hosts, to renew certificates or to add some; processes read theirs again by themselves.\n",
		filepath.Join(c.Dir, "ca.crt"))
	return nil
}
