package checkpoint

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"

	"baton/tensor"
)

// names is how a format calls its tensors. Those of a layer come after layer, with the number put in.
type names struct {
	config                   string // the file that Spec's numbers came from; empty for the weights' own
	embed, norm, head, layer string
	mtp                      string // a tensor of the layers that predict further tokens, and of no other
	inputNorm, postNorm      string
	latent                   latentNames
	q, k, v, o, qNorm, kNorm string
	gate, up, down           string
	experts                  expertNames
}

var hfNames = names{
	embed: "model.embed_tokens", norm: "model.norm", head: "lm_head", layer: "model.layers.%d.", mtp: "eh_proj.weight",
	inputNorm: "input_layernorm", postNorm: "post_attention_layernorm",
	q: "self_attn.q_proj", k: "self_attn.k_proj", v: "self_attn.v_proj", o: "self_attn.o_proj",
	qNorm: "self_attn.q_norm", kNorm: "self_attn.k_norm",
	latent: latentNames{
		qDown: "self_attn.q_a_proj", qDownNorm: "self_attn.q_a_layernorm", q: "self_attn.q_b_proj",
		kvDown: "self_attn.kv_a_proj_with_mqa", kvDownNorm: "self_attn.kv_a_layernorm", kvUp: "self_attn.kv_b_proj",
	},
	gate: "mlp.gate_proj", up: "mlp.up_proj", down: "mlp.down_proj",
	experts: expertNames{
		router: "mlp.gate",
		gate:   "mlp.experts.%d.gate_proj", up: "mlp.experts.%d.up_proj", down: "mlp.experts.%d.down_proj",
		allGateUp: "mlp.experts.gate_up_proj", allDown: "mlp.experts.down_proj",
		bias: "mlp.gate.e_score_correction_bias", shared: "mlp.shared_experts.",
	},
}

var ggufNames = names{
	embed: "token_embd", norm: "output_norm", head: "output", layer: "blk.%d.",
	inputNorm: "attn_norm", postNorm: "ffn_norm",
	q: "attn_q", k: "attn_k", v: "attn_v", o: "attn_output",
	qNorm: "attn_q_norm", kNorm: "attn_k_norm",
	gate: "ffn_gate", up: "ffn_up", down: "ffn_down",
	experts: expertNames{
		router:  "ffn_gate_inp",
		allGate: "ffn_gate_exps.weight", allUp: "ffn_up_exps.weight", allDown: "ffn_down_exps.weight",
	},
}

// presence is whether a checkpoint has a kind of tensor.
type presence int

const (
	never   presence = iota // what the file may hold under that name is not used
	always                  // its absence is an error
	perhaps                 // the file decides
)

// optional is about the tensors that some models of a family lack.
type optional struct {
	qkvBias, outBias, mlpBias, routerBias presence
	mtp                                   bool // layers behind the last may be there to predict further tokens
}

// loader looks tensors up and checks their shapes; the first problem sticks.
type loader struct {
	source source
	path   string
	err    error
}

// load fills Weights and what of Spec only the weights tell.
func (c *Checkpoint) load(n names, has optional) error {
	l := &loader{source: c.source, path: c.Path}
	s, w := &c.Spec, &c.Weights
	w.Embed = l.matrix(n.embed, s.VocabSize, s.HiddenSize)
	w.Norm = l.vector(n.norm, s.HiddenSize, always)
	for i := 0; i < s.Layers && l.err == nil; i++ {
		w.Layers = append(w.Layers, l.layer(s, n, i, has))
	}
	l.head(s, w, n.head)
	l.strays(n, s.Layers, has.mtp)
	if l.err != nil {
		return l.err
	}
	s.WeightType = w.commonType()
	return nil
}

func (l *loader) layer(s *Spec, n names, i int, has optional) Layer {
	at := func(name string) string { return fmt.Sprintf(n.layer, i) + name }
	out := Layer{
		InputNorm: l.vector(at(n.inputNorm), s.HiddenSize, always),
		PostNorm:  l.vector(at(n.postNorm), s.HiddenSize, always),
	}
	if s.Latent.Rank > 0 {
		l.latent(&out, s, n, at, has)
	} else {
		l.attention(&out, s, n, at, has)
	}
	if s.Sparse(i) {
		out.Router = l.matrix(at(n.experts.router), s.Experts.Count, s.HiddenSize)
		out.RouterBias = l.row(at(n.experts.bias), s.Experts.Count, has.routerBias)
		out.Experts = l.experts(s, n.experts, at)
		out.Shared = l.shared(s, n, at)
		return out
	}
	out.Gate = l.matrix(at(n.gate), s.Intermediate, s.HiddenSize)
	out.Up = l.matrix(at(n.up), s.Intermediate, s.HiddenSize)
	out.Down = l.matrix(at(n.down), s.HiddenSize, s.Intermediate)
	out.GateBias = l.bias(at(n.gate), s.Intermediate, has.mlpBias)
	out.UpBias = l.bias(at(n.up), s.Intermediate, has.mlpBias)
	out.DownBias = l.bias(at(n.down), s.HiddenSize, has.mlpBias)
	return out
}

func (l *loader) attention(out *Layer, s *Spec, n names, at func(string) string, has optional) {
	queries, keys := s.Heads*s.HeadDim, s.KVHeads*s.HeadDim
	qkNorm := never
	if s.QKNorm {
		qkNorm = always
	}
	out.Q = l.matrix(at(n.q), queries, s.HiddenSize)
	out.K = l.matrix(at(n.k), keys, s.HiddenSize)
	out.V = l.matrix(at(n.v), keys, s.HiddenSize)
	out.O = l.matrix(at(n.o), s.HiddenSize, queries)
	out.QBias = l.bias(at(n.q), queries, has.qkvBias)
	out.KBias = l.bias(at(n.k), keys, has.qkvBias)
	out.VBias = l.bias(at(n.v), keys, has.qkvBias)
	out.OBias = l.bias(at(n.o), s.HiddenSize, has.outBias)
	out.QNorm = l.vector(at(n.qNorm), s.HeadDim, qkNorm)
	out.KNorm = l.vector(at(n.kNorm), s.HeadDim, qkNorm)
}

// strays refuses a file with more layers than its config has, but for those that predict further tokens, which
// nothing here runs: such a layer starts by projecting the last layer's output beside the next token's
// embedding.
func (l *loader) strays(n names, layers int, mtp bool) {
	before, behind, _ := strings.Cut(n.layer, "%d")
	if l.err != nil {
		return
	}
	for _, t := range l.source.Tensors() {
		rest, ok := strings.CutPrefix(t.Name, before)
		number, _, layer := strings.Cut(rest, behind)
		i, err := strconv.Atoi(number)
		if !ok || !layer || err != nil || i < layers {
			continue
		}
		if _, predicts := l.source.Tensor(fmt.Sprintf(n.layer, i) + n.mtp); mtp && predicts {
			continue
		}
		l.err = problemf(tensor.ErrMalformed, l.path, fmt.Sprintf("tensor %q", t.Name), "is of layer %d, but the number of layers is said to be %d; does the config belong to these weights?", i, layers)
		return
	}
}

// head finds the output matrix. A file without one is tied whatever its config says; one that claims to
// be tied but holds another matrix is not, as transformers 5 has it.
func (l *loader) head(s *Spec, w *Weights, name string) {
	if l.err != nil {
		return
	}
	w.Head = w.Embed
	if _, ok := l.source.Tensor(name + ".weight"); !ok {
		s.TiedHead = true
		return
	}
	own := l.matrix(name, s.VocabSize, s.HiddenSize)
	if s.TiedHead && own.DType == w.Embed.DType && bytes.Equal(own.Data, w.Embed.Data) {
		return
	}
	s.TiedHead, w.Head = false, own
}

func (l *loader) matrix(name string, rows, cols int) tensor.Tensor {
	return l.multiplied(l.find(name+".weight", always, rows, cols))
}

// multiplied refuses a matrix, or a stack of them, of a type that cannot be one.
func (l *loader) multiplied(t tensor.Tensor) tensor.Tensor {
	switch t.DType {
	case tensor.Invalid, tensor.F32, tensor.F16, tensor.BF16:
	default:
		if !t.DType.Quantised() {
			l.refuseType(t)
		}
	}
	return t
}

func (l *loader) vector(name string, n int, p presence) tensor.Tensor {
	return l.row(name+".weight", n, p)
}
func (l *loader) bias(name string, n int, p presence) tensor.Tensor { return l.row(name+".bias", n, p) }

func (l *loader) row(name string, n int, p presence) tensor.Tensor {
	t := l.find(name, p, n)
	switch t.DType {
	case tensor.Invalid, tensor.F32, tensor.F16, tensor.BF16:
	default:
		l.refuseType(t)
	}
	return t
}

func (l *loader) refuseType(t tensor.Tensor) {
	if l.err == nil {
		l.err = problemf(tensor.ErrUnsupported, l.path, fmt.Sprintf("tensor %q", t.Name), "is of type %v, which a weight of this kind cannot have", t.DType)
	}
}

// find returns a tensor of exactly that shape, or the zero Tensor when there is none and need not be.
func (l *loader) find(name string, p presence, shape ...int) tensor.Tensor {
	if l.err != nil || p == never {
		return tensor.Tensor{}
	}
	t, ok := l.source.Tensor(name)
	field := fmt.Sprintf("tensor %q", name)
	if !ok {
		if p == always {
			l.err = problemf(tensor.ErrMissing, l.path, field, "is not in the checkpoint; expected shape %v", shape)
		}
		return tensor.Tensor{}
	}
	if fmt.Sprint(t.Shape) != fmt.Sprint(shape) {
		l.err = problemf(tensor.ErrMalformed, l.path, field, "has shape %v, expected %v", t.Shape, shape)
		return tensor.Tensor{}
	}
	return t
}

// commonType is the type that most bytes of the matrices have.
func (w *Weights) commonType() tensor.DType {
	size := make(map[tensor.DType]int)
	w.each(func(t tensor.Tensor) {
		if len(t.Shape) > 1 {
			size[t.DType] += len(t.Data)
		}
	})
	best := w.Embed.DType
	for t, n := range size {
		if n > size[best] || n == size[best] && t < best {
			best = t
		}
	}
	return best
}
