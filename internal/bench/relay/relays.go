//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime/pprof"
	"syscall"
	"time"

	"baton/frontend/relay"
)

// baton is our relay.
func baton(args []string) error {
	flags := flag.NewFlagSet("baton", flag.ExitOnError)
	listen := flags.String("listen", "127.0.0.1:9200", "address")
	engine := flags.String("engine", "sglang", "what the stubs are taken for")
	prefill := flags.String("prefill", "http://127.0.0.1:9101", "URL")
	decode := flags.String("decode", "http://127.0.0.1:9102", "URL")
	router := flags.String("router", "conversation", "of the prefill leg")
	profile := flags.String("cpuprofile", "", "file")
	_ = flags.Parse(args)
	s, err := relay.New(relay.Config{
		Prefill: []relay.Worker{{URL: *prefill}}, Decode: []relay.Worker{{URL: *decode}}, Engine: *engine, Connector: "nixl", PrefillRouter: *router,
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
	})
	if err != nil {
		return err
	}
	if *profile != "" {
		f, err := os.Create(*profile)
		if err != nil {
			return err
		}
		if err := pprof.StartCPUProfile(f); err != nil {
			return err
		}
		defer pprof.StopCPUProfile()
	}
	l, err := net.Listen("tcp", *listen)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	return s.Run(ctx, l)
}

// null is the least that a relay of the standard library's can do: decode the body, send it to both workers with one
// field more, and copy the second's answer.
func null(args []string) error {
	flags := flag.NewFlagSet("null", flag.ExitOnError)
	listen := flags.String("listen", "127.0.0.1:9201", "address")
	prefill := flags.String("prefill", "http://127.0.0.1:9101", "URL")
	decode := flags.String("decode", "http://127.0.0.1:9102", "URL")
	_ = flags.Parse(args)
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 1024, DialContext: (&net.Dialer{Timeout: 3 * time.Second}).DialContext}}
	return http.ListenAndServe(*listen, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		var fields map[string]json.RawMessage
		if err := json.Unmarshal(body, &fields); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		fields["bootstrap_room"] = json.RawMessage("1")
		if body, err = json.Marshal(fields); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		first := make(chan error, 1)
		go func() {
			res, err := client.Post(*prefill+r.URL.Path, "application/json", bytes.NewReader(body))
			if err == nil {
				_, err = io.Copy(io.Discard, res.Body)
				res.Body.Close()
			}
			first <- err
		}()
		res, err := client.Post(*decode+r.URL.Path, "application/json", bytes.NewReader(body))
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		defer res.Body.Close()
		w.Header().Set("Content-Type", res.Header.Get("Content-Type"))
		flush := w.(http.Flusher).Flush
		buf := make([]byte, 32<<10)
		for {
			n, err := res.Body.Read(buf)
			if n > 0 {
				if _, err := w.Write(buf[:n]); err != nil {
					return
				}
				flush()
			}
			if err != nil {
				break
			}
		}
		<-first
	}))
}
