//go:build unix

package rig

import (
	"context"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"sync"
	"time"
)

// Parts starts the processes of one fleet.
type Parts struct {
	Command   Command
	Model     string
	Transport string
	Flags     []string // more flags of engines
	Dir       string   // where logs go, one file a name; empty for nowhere
	// Line is called with every line that a process prints; nil for nobody. It must be safe for concurrent use.
	Line func(name, line string)

	mu    sync.Mutex
	files map[string]*os.File
}

// ServedModel is the name by which completions ask for the model of a fleet.
const ServedModel = "m"

var (
	coordinatorAt = regexp.MustCompile(`^coordinator at (\S+)`)
	frontendAt    = regexp.MustCompile(`^frontend at (\S+)`)
	servingAt     = regexp.MustCompile(`^Serving \S+ at (http\S+)`)
	metricsAt     = regexp.MustCompile(`msg=metrics address=(\S+)/metrics`)
	registered    = regexp.MustCompile(`msg=(registered)`)
)

// run starts a process whose log lands in the fleet's folder, behind that of its earlier lives.
func (f *Parts) run(name string, args ...string) (*Process, error) {
	w, err := f.file(name)
	if err != nil {
		return nil, err
	}
	var each func(string)
	if f.Line != nil {
		each = func(line string) { f.Line(name, line) }
	}
	return f.Command.Start(name, NewLog(w, each), args...)
}

func (f *Parts) file(name string) (io.Writer, error) {
	if f.Dir == "" {
		return nil, nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if w := f.files[name]; w != nil {
		return w, nil
	}
	w, err := os.OpenFile(filepath.Join(f.Dir, name+".log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, err
	}
	if f.files == nil {
		f.files = make(map[string]*os.File)
	}
	f.files[name] = w
	return w, nil
}

// Close closes the logs. All processes must have ended.
func (f *Parts) Close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, w := range f.files {
		_ = w.Close() // what could not be written is lost either way
	}
	f.files = nil
}

// await waits for lines and kills the process when they do not come.
func await(ctx context.Context, p *Process, patterns ...*regexp.Regexp) (groups []string, err error) {
	for _, pattern := range patterns {
		group, err := p.Await(ctx, pattern)
		if err != nil {
			_ = p.Kill() // err says more
			return nil, err
		}
		groups = append(groups, group)
	}
	return groups, nil
}

// Coordinator is a running coordinator and where it is reached.
type Coordinator struct {
	*Process
	Addr, Metrics string
}

// StartCoordinator starts one that listens at an address, 127.0.0.1:0 for any.
func (f *Parts) StartCoordinator(ctx context.Context, listen string) (*Coordinator, error) {
	p, err := f.run("coordinator", "coordinator", "--listen="+listen, "--metrics=127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	at, err := await(ctx, p, coordinatorAt, metricsAt)
	if err != nil {
		return nil, err
	}
	return &Coordinator{p, at[0], at[1]}, nil
}

// StartBareCoordinator starts one without metrics that logs from a level on.
func (f *Parts) StartBareCoordinator(ctx context.Context, logLevel string) (*Coordinator, error) {
	p, err := f.run("coordinator", "coordinator", "--listen=127.0.0.1:0", "--log-level="+logLevel)
	if err != nil {
		return nil, err
	}
	at, err := await(ctx, p, coordinatorAt)
	if err != nil {
		return nil, err
	}
	return &Coordinator{Process: p, Addr: at[0]}, nil
}

// Engine is a running engine.
type Engine struct {
	*Process
	Metrics string
}

// StartEngine starts one and waits until the coordinator has accepted it.
func (f *Parts) StartEngine(ctx context.Context, name, role, coordinator string) (*Engine, error) {
	p, err := f.run(name, append([]string{
		"engine", "--role=" + role, "--name=" + name, "--coordinator=" + coordinator, "--model=" + f.Model,
		"--transfer=" + f.Transport, "--metrics=127.0.0.1:0",
	}, f.Flags...)...)
	if err != nil {
		return nil, err
	}
	at, err := await(ctx, p, metricsAt, registered)
	if err != nil {
		return nil, err
	}
	return &Engine{p, at[0]}, nil
}

// Server is a running frontend, or everything in one process.
type Server struct {
	*Process
	URL string
}

// StartFrontend starts one.
func (f *Parts) StartFrontend(ctx context.Context, coordinator string) (*Server, error) {
	p, err := f.run("frontend", "frontend", "--listen=127.0.0.1:0", "--coordinator="+coordinator, "--model="+f.Model,
		"--served-model-name="+ServedModel)
	if err != nil {
		return nil, err
	}
	at, err := await(ctx, p, frontendAt)
	if err != nil {
		return nil, err
	}
	return &Server{p, at[0]}, nil
}

// StartColocated starts a whole fleet in one process, whose engine runs requests from prompt to end.
func (f *Parts) StartColocated(ctx context.Context) (*Server, error) {
	p, err := f.run("colocated", append([]string{
		"serve", "--listen=127.0.0.1:0", "--shards=tp=1", "--model=" + f.Model, "--served-model-name=" + ServedModel,
	}, f.Flags...)...)
	if err != nil {
		return nil, err
	}
	at, err := await(ctx, p, servingAt)
	if err != nil {
		return nil, err
	}
	return &Server{p, at[0]}, nil
}

// AwaitHealth waits until the server would take a request.
func (s *Server) AwaitHealth(ctx context.Context, client *http.Client) error {
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.URL+"/health", nil)
		if err != nil {
			return err
		}
		if resp, err := client.Do(req); err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
