package checkpoint

import (
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"

	"baton/tensor"
)

// Format is the container that the weights came in.
type Format string

// The formats that Open reads.
const (
	Safetensors Format = "safetensors"
	GGUF        Format = "gguf"
)

// Checkpoint is one opened model. It is immutable and may be read by many goroutines; whoever opened it
// closes it, after the last use of any tensor.
type Checkpoint struct {
	Path    string // the folder, or the .gguf file
	Spec    Spec
	Weights Weights

	gguf     *tensor.GGUF // nil for a folder
	source   source
	identity string // what the file said about rope, in its own numbers; part of the fingerprint
}

// source is an opened container of tensors.
type source interface {
	Tensor(name string) (tensor.Tensor, bool)
	Tensors() []tensor.Tensor // by name
	Forget(t tensor.Tensor)
	Close() error
}

// Open opens a Hugging Face folder (config.json, model.safetensors or its sharded index, and
// generation_config.json when there) or a .gguf file. It reads headers only; the weights stay in the
// files' memory maps. Errors are *tensor.FileError.
func Open(path string) (*Checkpoint, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, &tensor.FileError{Path: path, Problem: "cannot be opened: " + reason(err), Err: err}
	}
	if info.IsDir() {
		return openFolder(path)
	}
	if strings.HasSuffix(path, ".safetensors") {
		return nil, problemf(tensor.ErrUnsupported, path, "", "is only the weights; name the folder that also holds config.json (%s)", filepath.Dir(path))
	}
	isGGUF, err := startsWith(path, "GGUF")
	if err != nil {
		return nil, &tensor.FileError{Path: path, Problem: "cannot be read: " + reason(err), Err: err}
	}
	if isGGUF || strings.HasSuffix(path, ".gguf") {
		return openGGUF(path)
	}
	return nil, problemf(tensor.ErrUnsupported, path, "", "is neither a folder with config.json nor a .gguf file")
}

// Format says what container the weights came in.
func (c *Checkpoint) Format() Format {
	if c.gguf != nil {
		return GGUF
	}
	return Safetensors
}

// GGUF is the opened file, whose metadata holds tokenizer and chat template; nil for a folder, where they
// are files under Path. It belongs to the Checkpoint: do not close it.
func (c *Checkpoint) GGUF() *tensor.GGUF { return c.gguf }

// Forget lets the system have the memory back that reading a slice of a weight took: for those who have a copy. It
// can be read again.
func (c *Checkpoint) Forget(t tensor.Tensor) { c.source.Forget(t) }

// Close unmaps the weights. A second call does nothing.
func (c *Checkpoint) Close() error { return c.source.Close() }

// Parameters is the number of weights, a tied head counted once.
func (c *Checkpoint) Parameters() int64 {
	var n int64
	c.Weights.each(func(t tensor.Tensor) { n += int64(t.Elements()) })
	return n
}

// Bytes is the size of all weights as stored, a tied head counted once.
func (c *Checkpoint) Bytes() int64 { return c.Weights.Bytes() }

// Bytes is the size of the weights as stored, a tied head counted once. What lies between the rows of slices of
// columns does not count.
func (w *Weights) Bytes() int64 {
	var n int64
	w.each(func(t tensor.Tensor) { n += int64(t.Rows()) * int64(t.DType.RowBytes(t.Cols())) })
	return n
}

// String sums the model up in one line for logs.
func (c *Checkpoint) String() string {
	return fmt.Sprintf("%s, %d layers, %.1fM parameters, %s (%s, %.1f MB)", c.Spec.Family, c.Spec.Layers,
		float64(c.Parameters())/1e6, c.Spec.WeightType, c.Format(), float64(c.Bytes())/1e6)
}

// each calls f for every tensor that the model has, once.
func (w *Weights) each(f func(tensor.Tensor)) {
	visit := func(t tensor.Tensor) {
		if t.Data != nil {
			f(t)
		}
	}
	visit(w.Embed)
	for i := range w.Layers {
		l := &w.Layers[i]
		for _, t := range []tensor.Tensor{
			l.InputNorm, l.PostNorm, l.Q, l.K, l.V, l.O, l.QBias, l.KBias, l.VBias, l.OBias,
			l.QNorm, l.KNorm, l.Gate, l.Up, l.Down, l.GateBias, l.UpBias, l.DownBias, l.Router,
			l.QDown, l.QDownBias, l.QDownNorm, l.KVDown, l.KVDownBias, l.KVDownNorm, l.RouterBias,
		} {
			visit(t)
		}
		for i := range l.KUp {
			visit(l.KUp[i])
			visit(l.VUp[i])
		}
		for _, e := range append(l.Experts[:len(l.Experts):len(l.Experts)], l.Shared) {
			visit(e.Gate)
			visit(e.Up)
			visit(e.Down)
		}
	}
	visit(w.Norm)
	if w.Head.Name != w.Embed.Name {
		visit(w.Head)
	}
}

// finish checks what both formats share, loads the weights and hands over the source.
func (c *Checkpoint) finish(rope ropeParams, n names, has optional) error {
	frequencies, err := rope.frequencies()
	if err != nil {
		return c.problem(n.config, err)
	}
	c.Spec.Rope.Frequencies, c.Spec.Rope.Scale = frequencies, float32(rope.attention)
	if c.Spec.Latent.Rank > 0 {
		c.Spec.Latent.Scale = float32(rope.scores / math.Sqrt(float64(c.Spec.HeadDim)))
	}
	round := func(v float64) float64 { return math.Round(v*1e6) / 1e6 } // the last bits of a logarithm differ between CPUs
	rope.attention, rope.scores = round(rope.attention), round(rope.scores)
	c.identity = fmt.Sprintf("%+v", rope)
	if err := c.Spec.check(); err != nil {
		return c.problem(n.config, err)
	}
	return c.load(n, has)
}

// problem adds the file to an error of a pure function that knows only the field.
func (c *Checkpoint) problem(path string, err error) error {
	if path == "" {
		path = c.Path
	}
	var p *fieldError
	if errors.As(err, &p) {
		return &tensor.FileError{Path: path, Field: p.field, Problem: p.problem, Err: p.kind}
	}
	return err
}

// fieldError is a FileError before anybody knows the file.
type fieldError struct {
	kind           error
	field, problem string
}

func (e *fieldError) Error() string { return e.field + ": " + e.problem }
func (e *fieldError) Unwrap() error { return e.kind }

func malformed(field, format string, args ...any) error {
	return &fieldError{tensor.ErrMalformed, field, fmt.Sprintf(format, args...)}
}

func unsupported(field, format string, args ...any) error {
	return &fieldError{tensor.ErrUnsupported, field, fmt.Sprintf(format, args...)}
}

func problemf(kind error, path, field, format string, args ...any) error {
	return &tensor.FileError{Path: path, Field: field, Problem: fmt.Sprintf(format, args...), Err: kind}
}

// reason is an operating system error without the path that the caller names anyway.
func reason(err error) string {
	var pe *os.PathError
	if errors.As(err, &pe) {
		return pe.Err.Error()
	}
	return err.Error()
}

func startsWith(path, magic string) (bool, error) {
	f, err := os.Open(path)
	if err != nil {
		return false, err
	}
	defer f.Close()
	head := make([]byte, len(magic))
	switch _, err := io.ReadFull(f, head); {
	case err == io.EOF || err == io.ErrUnexpectedEOF:
		return false, nil
	case err != nil:
		return false, err
	}
	return string(head) == magic, nil
}
