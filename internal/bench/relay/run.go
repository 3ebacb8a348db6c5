//go:build linux

package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"text/tabwriter"
	"time"
)

// figure is what one relay did under one load.
type figure struct {
	Relay       string  `json:"relay"`
	Step        float64 `json:"step_ms"` // between events; 0 is as fast as they are taken
	Concurrency int     `json:"concurrency"`
	Requests    int     `json:"requests"`
	CPU         float64 `json:"cpu_us_per_request"`
	P50         float64 `json:"p50_ms"` // of a whole request
	P99         float64 `json:"p99_ms"`
	First50     float64 `json:"first_p50_ms"` // until the first event
	First99     float64 `json:"first_p99_ms"`
	PerSecond   float64 `json:"requests_per_s"`
	Chunks      float64 `json:"chunks_per_core_s"` // events per CPU-second of the relay
	Failed      int     `json:"failed,omitempty"`
}

// target is a relay that is measured: a command of this program's, or one that the caller gives.
type target struct {
	name string
	url  string
	args []string // of the process to start; nil for none
}

func run(args []string) error {
	flags := flag.NewFlagSet("run", flag.ExitOnError)
	tokens := flags.Int("tokens", 512, "events of a stream")
	step := flags.Duration("step", 0, "time between tokens; 0 is as fast as they are taken")
	prompt := flags.Int("prompt", 32768, "ids of a prompt")
	concurrency := flags.String("concurrency", "16,64,256", "requests at a time, in a closed loop")
	requests := flags.Int("requests", 512, "requests of one measurement")
	path := flags.String("path", "/v1/completions", "endpoint: /v1/completions or /generate with ids, /v1/chat/completions with text of that size")
	only := flags.String("only", "", "names of relays, separated by commas")
	others := flags.String("others", "", "more relays: NAME=PORT=COMMAND, separated by semicolons; %P in a command is the port")
	asJSON := flags.Bool("json", false, "print JSON")
	profile := flags.String("cpuprofile", "", "of our relay")
	_ = flags.Parse(args)
	self, err := os.Executable()
	if err != nil {
		return err
	}
	targets := ours(self)
	if *profile != "" {
		for i := range targets {
			if strings.HasPrefix(targets[i].name, "baton") {
				targets[i].args = append(targets[i].args, "-cpuprofile", *profile+"."+targets[i].name)
			}
		}
	}
	for _, other := range strings.Split(*others, ";") {
		if part := strings.SplitN(other, "=", 3); len(part) == 3 {
			targets = append(targets, target{
				name: part[0], url: "http://127.0.0.1:" + part[1], args: strings.Fields(strings.ReplaceAll(part[2], "%P", part[1])),
			})
		}
	}
	if *only != "" {
		targets = slices.DeleteFunc(targets, func(t target) bool { return !slices.Contains(strings.Split(*only, ","), t.name) })
	}
	figures, err := measure(self, targets, &load{path: *path, tokens: *tokens, prompt: *prompt, step: *step, concurrency: *concurrency, requests: *requests})
	if err != nil {
		return err
	}
	return show(figures, *asJSON)
}

// ours are the relays that this program has, and the decode stub itself.
func ours(self string) []target {
	list := []target{
		{name: "direct", url: "http://127.0.0.1:9102"},
		{name: "null", url: "http://127.0.0.1:9201", args: []string{self, "null"}},
	}
	for i, engine := range []string{"sglang", "trtllm", "vllm"} {
		addr := "127.0.0.1:" + strconv.Itoa(9210+i)
		list = append(list, target{name: "baton-" + engine, url: "http://" + addr, args: []string{self, "baton", "-engine", engine, "-listen", addr}})
	}
	return list
}

// measure puts each relay before a pair of stubs, one after the other, under a load.
func measure(self string, targets []target, l *load) ([]figure, error) {
	stop, err := start(self, "stub", "-tokens", strconv.Itoa(l.tokens), "-step", l.step.String(), "-prompt", strconv.Itoa(l.prompt))
	if err != nil {
		return nil, err
	}
	defer stop()
	l.body = body(l.path, l.prompt, l.tokens)
	var figures []figure
	for _, t := range targets {
		got, err := l.measure(t)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", t.name, err)
		}
		figures = append(figures, got...)
	}
	return figures, nil
}

func show(figures []figure, asJSON bool) error {
	if asJSON {
		return json.NewEncoder(os.Stdout).Encode(figures)
	}
	return table(figures)
}

func table(figures []figure) error {
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "relay\tms between events\tat a time\trequests\tCPU µs a request\tp50 ms\tp99 ms\tfirst event p50\tp99\trequests/s\tevents per CPU-s\tfailed\t")
	for _, f := range figures {
		fmt.Fprintf(w, "%s\t%g\t%d\t%d\t%.0f\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f\t%.0f\t%d\t\n", f.Relay, f.Step, f.Concurrency, f.Requests, f.CPU, f.P50, f.P99, f.First50, f.First99, f.PerSecond, f.Chunks, f.Failed)
	}
	return w.Flush()
}

// body is a request.
func body(path string, prompt, tokens int) []byte {
	var b bytes.Buffer
	b.WriteString(`{"model":"stub","stream":true,"max_tokens":` + strconv.Itoa(tokens) + `,`)
	if strings.HasSuffix(path, "/chat/completions") {
		b.WriteString(`"messages":[{"role":"user","content":"`)
		for b.Len() < prompt*6 {
			b.WriteString("a few words of a long prompt ")
		}
		b.WriteString(`"}]}`)
		return b.Bytes()
	}
	field := "prompt"
	if strings.HasSuffix(path, "/generate") { // SGLang's own endpoint
		field = "input_ids"
		b.WriteString(`"sampling_params":{"max_new_tokens":` + strconv.Itoa(tokens) + `},`)
	}
	b.WriteString(`"` + field + `":[`)
	for i := range prompt {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.Itoa(10000 + i*7919%100000))
	}
	b.WriteString(`]}`)
	return b.Bytes()
}

// start starts a process; stop ends it.
func start(name string, args ...string) (stop func(), err error) {
	_, stop, err = startProcess(name, args...)
	return stop, err
}

func startProcess(name string, args ...string) (pid int, stop func(), err error) {
	cmd := exec.Command(name, args...)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return 0, nil, err
	}
	return cmd.Process.Pid, func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM)
		done := make(chan struct{})
		go func() {
			_ = cmd.Wait()
			close(done)
		}()
		select {
		case <-done:
		case <-time.After(5 * time.Second):
			_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
			<-done
		}
	}, nil
}

// load is what is sent to every relay.
type load struct {
	path        string
	tokens      int           // events of a stream
	prompt      int           // ids
	step        time.Duration // between events
	concurrency string        // requests at a time, several after commas
	requests    int           // two rounds at least
	body        []byte
}

func (l *load) measure(t target) (list []figure, err error) {
	pid := 0
	if t.args != nil {
		var stop func()
		if pid, stop, err = startProcess(t.args[0], t.args[1:]...); err != nil {
			return nil, err
		}
		defer stop()
	}
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 1024, DisableCompression: true}}
	defer client.CloseIdleConnections()
	deadline := time.Now().Add(60 * time.Second)
	for {
		if _, _, err = l.request(client, t.url); err == nil {
			break
		}
		if time.Now().After(deadline) {
			return nil, err
		}
		time.Sleep(200 * time.Millisecond)
	}
	for _, text := range strings.Split(l.concurrency, ",") {
		n, err := strconv.Atoi(text)
		if err != nil {
			return nil, err
		}
		l.loop(client, t.url, n, min(n, 32)) // warms connections
		before := cpu(pid)
		f := l.loop(client, t.url, n, max(l.requests, 2*n))
		used := cpu(pid) - before
		f.Relay, f.Step = t.name, float64(l.step.Microseconds())/1000
		f.CPU = float64(used.Microseconds()) / float64(f.Requests)
		if used > 0 {
			f.Chunks = float64(f.Requests*l.tokens) / used.Seconds()
		}
		fmt.Fprintf(os.Stderr, "%s, %d at a time: %.0f µs of CPU a request\n", f.Relay, f.Concurrency, f.CPU)
		list = append(list, f)
	}
	return list, nil
}

// loop sends requests in a closed loop.
func (l *load) loop(client *http.Client, url string, concurrency, requests int) figure {
	var left, failures atomic.Int64
	left.Store(int64(requests))
	var mu sync.Mutex
	var whole, first []float64
	var group sync.WaitGroup
	began := time.Now()
	for range concurrency {
		group.Go(func() {
			for left.Add(-1) >= 0 {
				f, w, err := l.request(client, url)
				if err != nil {
					if failures.Add(1) == 1 {
						fmt.Fprintln(os.Stderr, "request:", err)
					}
					continue
				}
				mu.Lock()
				first, whole = append(first, f), append(whole, w)
				mu.Unlock()
			}
		})
	}
	group.Wait()
	took := time.Since(began).Seconds()
	if len(whole) == 0 {
		whole, first = []float64{0}, []float64{0}
	}
	return figure{
		Concurrency: concurrency, Requests: requests, Failed: int(failures.Load()),
		P50: quantile(whole, .5), P99: quantile(whole, .99), First50: quantile(first, .5), First99: quantile(first, .99),
		PerSecond: float64(len(whole)) / took,
	}
}

func quantile(list []float64, q float64) float64 {
	slices.Sort(list)
	return list[min(len(list)-1, int(q*float64(len(list))))]
}

// request sends one and counts its events; times are in ms.
func (l *load) request(client *http.Client, url string) (first, whole float64, err error) {
	start := time.Now()
	res, err := client.Post(url+l.path, "application/json", bytes.NewReader(l.body))
	if err != nil {
		return 0, 0, err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(res.Body, 300))
		return 0, 0, fmt.Errorf("%s: %s", res.Status, text)
	}
	buf := make([]byte, 64<<10)
	events := 0
	var tail [14]byte
	for {
		n, err := res.Body.Read(buf)
		if n > 0 {
			if first == 0 {
				first = float64(time.Since(start).Microseconds()) / 1000
			}
			events += bytes.Count(buf[:n], []byte("data: "))
			copy(tail[:], append(tail[min(n, len(tail)):], buf[max(0, n-len(tail)):n]...))
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			return 0, 0, err
		}
	}
	// A prefix may be cut between two reads; that is rare, and the end is looked at as well.
	if !bytes.Contains(tail[:], []byte("[DONE]")) || events < l.tokens*9/10 {
		return 0, 0, errors.New("the stream is not whole: " + strconv.Itoa(events) + " events, " + strconv.Quote(string(tail[:])))
	}
	return first, float64(time.Since(start).Microseconds()) / 1000, nil
}

// cpu is what a process and its children that are gone have used; 0 for no process.
func cpu(pid int) time.Duration {
	if pid == 0 {
		return 0
	}
	f, err := os.Open("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0
	}
	defer f.Close()
	line, _ := bufio.NewReader(f).ReadString('\n')
	fields := strings.Fields(line[strings.LastIndexByte(line, ')')+1:])
	var ticks int64
	for _, at := range []int{11, 12, 13, 14} { // utime, stime and those of children
		n, _ := strconv.ParseInt(fields[at], 10, 64)
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}
