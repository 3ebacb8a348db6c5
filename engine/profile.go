package engine

import (
	"errors"
	"fmt"
	"os"
	"runtime/pprof"
	"runtime/trace"
)

// profile is a CPU profile and an execution trace of the process, while they are being written.
type profile struct{ cpu, trace *os.File }

// startProfile writes PATH.cpu.pprof and PATH.trace until stop. A process has one profile at a time.
func startProfile(path string) (p *profile, err error) {
	p = &profile{}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("engine: profile %s: %w", path, err), p.close())
		}
	}()
	if p.cpu, err = os.Create(path + ".cpu.pprof"); err != nil {
		return nil, err
	}
	if p.trace, err = os.Create(path + ".trace"); err != nil {
		return nil, err
	}
	if err = pprof.StartCPUProfile(p.cpu); err != nil {
		return nil, err
	}
	if err = trace.Start(p.trace); err != nil {
		pprof.StopCPUProfile()
		return nil, err
	}
	return p, nil
}

func (p *profile) stop() error {
	pprof.StopCPUProfile()
	trace.Stop()
	return p.close()
}

func (p *profile) close() error {
	var errs []error
	for _, f := range []*os.File{p.cpu, p.trace} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}
