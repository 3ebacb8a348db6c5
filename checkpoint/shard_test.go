package checkpoint

import (
	"testing"

	"baton/layout"
)

// The bytes of slices are those of the rows that they have, not of what lies between.
func TestShardBytes(t *testing.T) {
	ck, err := Open("../testdata/goldens/qwen2")
	if err != nil {
		t.Fatal(err)
	}
	defer ck.Close()
	s := layout.Shard{TP: 2, PP: 1, DP: 1, EP: 1, ExpertTP: 2}
	var sum int64
	for rank := range 2 {
		p, err := s.Part(rank, ck.Spec.Layers)
		if err != nil {
			t.Fatal(err)
		}
		w := ck.Shard(p)
		sum += w.Bytes()
	}
	norms := int64(4 * ck.Spec.HiddenSize * (2*ck.Spec.Layers + 1))
	if sum != ck.Bytes()+norms {
		t.Errorf("two ranks have %d bytes, want the %d of the model and the norms, %d, once more", sum, ck.Bytes(), norms)
	}
}
