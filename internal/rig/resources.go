//go:build unix

package rig

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// Resources are what a process holds and has used, from /proc.
type Resources struct {
	CPU   time.Duration // of all its threads, in user and kernel mode, in steps of 10 ms
	RSS   int64         // bytes
	Files int           // open descriptors, but for those of the next two
	Conns int           // TCP connections
	Dead  int           // TCP connections that the peer has closed and this process has not
	Pools int           // mapped KV pools, its own and those of its peers
}

// clockTick is the unit of /proc/PID/stat, the same on every Linux.
const clockTick = 10 * time.Millisecond

// Resources looks at the process now.
func (p *Process) Resources() (Resources, error) {
	var r Resources
	dir := fmt.Sprintf("/proc/%d/", p.Pid())
	fail := func(err error) (Resources, error) { return r, fmt.Errorf("rig: %s: %w", p.Name, err) }
	stat, err := os.ReadFile(dir + "stat")
	if err != nil {
		return fail(err)
	}
	if r.CPU, r.RSS, err = parseStat(string(stat)); err != nil {
		return fail(err)
	}
	if err := r.descriptors(dir); err != nil {
		return fail(err)
	}
	maps, err := os.ReadFile(dir + "maps")
	if err != nil {
		return fail(err)
	}
	r.Pools = bytes.Count(maps, []byte("/memfd:baton-"))
	return r, nil
}

// descriptors counts what is open, by kind.
func (r *Resources) descriptors(dir string) error {
	files, err := os.ReadDir(dir + "fd")
	if err != nil {
		return err
	}
	states := make(map[string]string) // of sockets, by inode
	for _, family := range []string{"tcp", "tcp6"} {
		table, err := os.ReadFile(dir + "net/" + family)
		if err != nil && !errors.Is(err, os.ErrNotExist) { // a system may have no IPv6
			return err
		}
		socketStates(string(table), states)
	}
	const closeWait, listen = "08", "0A"
	for _, f := range files {
		target, err := os.Readlink(dir + "fd/" + f.Name())
		if err != nil {
			continue // closed meanwhile
		}
		switch state := states[target]; state {
		case "", listen:
			r.Files++
		case closeWait:
			r.Dead++
		default:
			r.Conns++
		}
	}
	return nil
}

// socketStates reads /proc/PID/net/tcp: the state of each socket, by what the links of /proc/PID/fd call it.
func socketStates(table string, states map[string]string) {
	for line := range strings.Lines(table) {
		const state, inode = 3, 9
		f := strings.Fields(line)
		if len(f) > inode && f[0] != "sl" && f[inode] != "0" { // not the headings, nor a socket that nobody has any more
			states["socket:["+f[inode]+"]"] = f[state]
		}
	}
}

// parseStat reads the times and the resident pages of /proc/PID/stat. The second field, the program's name
// in brackets, may hold anything.
func parseStat(stat string) (cpu time.Duration, rss int64, err error) {
	_, rest, ok := cutLast(stat, ")")
	fields := strings.Fields(rest)
	const utime, stime, resident = 14 - 3, 15 - 3, 24 - 3 // numbered from 1 in the manual; the third comes first here
	if !ok || len(fields) <= resident {
		return 0, 0, fmt.Errorf("unexpected stat %q", stat)
	}
	var n [3]int64
	for i, at := range []int{utime, stime, resident} {
		if n[i], err = strconv.ParseInt(fields[at], 10, 64); err != nil {
			return 0, 0, fmt.Errorf("unexpected stat %q: %w", stat, err)
		}
	}
	return time.Duration(n[0]+n[1]) * clockTick, n[2] * int64(os.Getpagesize()), nil
}

func cutLast(s, sep string) (before, after string, ok bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(sep):], true
}
