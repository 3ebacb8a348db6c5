package model_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"baton/checkpoint"
	"baton/collective"
	"baton/compute"
	"baton/compute/cpu"
	"baton/internal/modelfile"
	"baton/layout"
	"baton/model"
)

// TestMain lets the test binary be one rank's process.
func TestMain(m *testing.M) {
	if job := os.Getenv("BATON_TEST_RANK"); job != "" {
		if err := runRankProcess(job); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// rankJob is what a rank's process is to do.
type rankJob struct {
	Model, Shard, Leader string // where rank 0's process listens; empty for that one
	Rank                 int
}

// rankMemory is what it reports.
type rankMemory struct {
	Shard int64 // bytes of the rank's weights
	File  int64 // of the checkpoint's mapping that are resident, after a pass
	Own   int64 // of memory that belongs to nobody else
}

func runRankProcess(text string) error {
	var job rankJob
	if err := json.Unmarshal([]byte(text), &job); err != nil {
		return err
	}
	ck, err := checkpoint.Open(job.Model)
	if err != nil {
		return err
	}
	defer ck.Close()
	shards, err := layout.ParseShards(job.Shard)
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	mesh := collective.MeshConfig{
		Size: shards[0].Ranks(), Local: []int{job.Rank}, Listener: listener, Secret: []byte("test"), Silence: 10 * time.Second,
	}
	if job.Rank == 0 {
		fmt.Println(listener.Addr())
	} else {
		mesh.Peers = []string{job.Leader}
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	worlds, err := collective.Join(ctx, mesh)
	if err != nil {
		return err
	}
	r := rank{world: worlds[0]}
	if r.backend, err = cpu.New(cpu.Options{Threads: 1}); err != nil {
		return err
	}
	memory, err := r.measure(ck, shards[0])
	if err != nil {
		return errors.Join(err, r.world.Close(), r.backend.Close())
	}
	return errors.Join(json.NewEncoder(os.Stdout).Encode(memory), r.world.Close(), r.backend.Close())
}

// measure loads the rank's part, runs a pass and looks at the process's memory.
func (r *rank) measure(ck *checkpoint.Checkpoint, s layout.Shard) (rankMemory, error) {
	before, err := residentMemory("model.safetensors")
	if err != nil {
		return before, err
	}
	if err := r.open(ck, s); err != nil {
		return before, err
	}
	batch := newBatch()
	if s.Lockstep() {
		engines, _ := s.ExpertEngines(r.world.Rank())
		for range engines {
			batch.Lockstep = append(batch.Lockstep, len(batch.Tokens))
		}
	}
	if err := r.decoder.Forward(r.weights, r.kv, batch, func(int, []float32) {}); err != nil {
		return before, err
	}
	after, err := residentMemory("model.safetensors")
	if err != nil {
		return after, err
	}
	part, err := s.Part(r.world.Rank(), ck.Spec.Layers)
	weights := ck.Shard(part)
	return rankMemory{Shard: weights.Bytes(), File: after.File, Own: after.Own - before.Own}, err
}

// newBatch is a prompt of 40 tokens.
func newBatch() model.Batch {
	var b model.Batch
	for i := range 40 {
		b.Tokens = append(b.Tokens, int32(i*37))
		b.Positions = append(b.Positions, int32(i))
		b.Slots = append(b.Slots, int32(i))
	}
	b.Sequences = []compute.Sequence{{Rows: len(b.Tokens), Blocks: []int32{0, 1, 2}}}
	b.Logits = []int32{int32(len(b.Tokens) - 1)}
	return b
}

// residentMemory reads from /proc how much of a file's mapping is resident, and of memory without a file.
func residentMemory(file string) (rankMemory, error) {
	f, err := os.Open("/proc/self/smaps")
	if err != nil {
		return rankMemory{}, err
	}
	defer f.Close()
	var m rankMemory
	mapped := ""
	for lines := bufio.NewScanner(f); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		switch {
		case strings.Contains(fields[0], "-"): // the head of a mapping
			mapped = ""
			if len(fields) > 5 {
				mapped = fields[5]
			}
		case fields[0] == "Rss:" || fields[0] == "Anonymous:":
			kib, err := strconv.ParseInt(fields[1], 10, 64)
			if err != nil {
				return m, err
			}
			if fields[0] == "Rss:" && strings.HasSuffix(mapped, file) {
				m.File += kib << 10
			} else if fields[0] == "Anonymous:" {
				m.Own += kib << 10
			}
		}
	}
	return m, nil
}

// A rank in a process of its own has no more of a checkpoint in memory than what it computes with.
func TestRanksReadTheirShards(t *testing.T) {
	if testing.Short() || runtime.GOOS != "linux" {
		t.Skip("writes checkpoints of 150 MB, and reads /proc")
	}
	dense := modelfile.Random{
		Layers: 4, Hidden: 1024, Intermediate: 4096, Vocab: 8192, Heads: 16, KVHeads: 8, HeadDim: 64, Positions: 512, BF16: true, Seed: 1,
	}
	sparse := dense
	sparse.Layers, sparse.Experts, sparse.TopK, sparse.ExpertWidth = 2, 8, 4, 1024
	for name, tt := range map[string]struct {
		model  modelfile.Random
		shards []string
	}{
		"dense":  {dense, []string{"tp=4", "tp=2,pp=2"}},
		"sparse": {sparse, []string{"tp=4", "tp=2,ep=2,expt_tp=1"}},
	} {
		folder := filepath.Join(t.TempDir(), name)
		if err := tt.model.Write(folder); err != nil {
			t.Fatal(err)
		}
		for _, shard := range tt.shards {
			t.Run(name+"/"+shard, func(t *testing.T) {
				for i, m := range rankProcesses(t, folder, shard) {
					t.Logf("rank %d: its shard has %.1f MB; %.1f MB of the file are resident and %.1f MB beside", i,
						float64(m.Shard)/1e6, float64(m.File)/1e6, float64(m.Own)/1e6)
					// Pages at the edges of slices, the cache and the workspace come on top; most rows of the
					// embedding are never read.
					if got, most := m.File+m.Own, m.Shard+m.Shard/16+(12<<20); got > most || got < m.Shard/2 {
						t.Errorf("rank %d: %d bytes resident for a shard of %d; at most %d", i, got, m.Shard, most)
					}
				}
			})
		}
	}
}

// rankProcesses runs a shard's ranks, each in a process, and returns what they report.
func rankProcesses(t *testing.T, folder, shard string) []rankMemory {
	t.Helper()
	shards, err := layout.ParseShards(shard)
	if err != nil {
		t.Fatal(err)
	}
	outs := make([]*bufio.Scanner, shards[0].Ranks())
	job := rankJob{Model: folder, Shard: shard}
	for i := range outs {
		job.Rank = i
		text, err := json.Marshal(job)
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(os.Args[0])
		cmd.Env, cmd.Stderr = append(os.Environ(), "BATON_TEST_RANK="+string(text)), os.Stderr
		out, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if t.Failed() {
				_ = cmd.Process.Kill() // it may wait for others that have failed
			}
			if err := cmd.Wait(); err != nil && !t.Failed() {
				t.Errorf("rank %d: %v", i, err)
			}
		})
		if outs[i] = bufio.NewScanner(out); i == 0 && outs[i].Scan() {
			job.Leader = outs[i].Text()
		}
	}
	memories := make([]rankMemory, len(outs))
	for i, out := range outs {
		if !out.Scan() {
			t.Fatalf("rank %d says nothing", i)
		}
		if err := json.Unmarshal(out.Bytes(), &memories[i]); err != nil {
			t.Fatal(err)
		}
	}
	return memories
}
