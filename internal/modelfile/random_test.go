package modelfile

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"baton/checkpoint"
	"baton/tensor"
)

func TestRandom(t *testing.T) {
	dense := Random{Layers: 2, Hidden: 32, Intermediate: 64, Vocab: 100, Heads: 4, KVHeads: 2, HeadDim: 8, Positions: 128, BF16: true, Seed: 1}
	sparse := dense
	sparse.BF16, sparse.Experts, sparse.TopK, sparse.ExpertWidth = false, 4, 2, 16
	for name, r := range map[string]Random{"qwen3": dense, "qwen3_moe": sparse} {
		var files [3][]byte
		for i, seed := range []uint64{1, 1, 2} {
			folder := filepath.Join(t.TempDir(), "model")
			r.Seed = seed
			if err := r.Write(folder); err != nil {
				t.Fatal(err)
			}
			var err error
			if files[i], err = os.ReadFile(filepath.Join(folder, "model.safetensors")); err != nil {
				t.Fatal(err)
			}
			ck, err := checkpoint.Open(folder)
			if err != nil {
				t.Fatal(err)
			}
			s := ck.Spec
			if s.Family != name || s.Heads != 4 || s.KVHeads != 2 || s.HeadDim != 8 || s.Layers != 2 || s.TiedHead ||
				s.Experts.Count != r.Experts || (s.WeightType == tensor.BF16) != r.BF16 {
				t.Errorf("%s: %+v", name, s)
			}
			ck.Close()
		}
		if !bytes.Equal(files[0], files[1]) || bytes.Equal(files[0], files[2]) {
			t.Errorf("%s: a seed must tell the weights, and nothing else", name)
		}
	}
}
