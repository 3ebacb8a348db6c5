package model

import (
	"fmt"
	"slices"

	"baton/collective"
	"baton/compute"
	"baton/layout"
)

// Ranks is a rank's part of the model and the groups of ranks with which it computes.
type Ranks struct {
	Part     layout.Part
	Tensor   Group // those that split the same layers
	Pipeline Group // the stages, in order
	Experts  Group // those that hold all experts together
	Tokens   Group // one of each engine whose tokens these experts compute
}

// Group is a set of ranks, or, when it is empty, this rank alone.
type Group struct{ collective.Group }

// Solo is an engine of one rank.
func Solo(layers int) Ranks { return Ranks{Part: layout.Whole(layers)} }

// Join makes the groups of a shard's rank. All ranks of the shard join.
func Join(world *collective.World, shard layout.Shard, layers int) (Ranks, error) {
	rank := world.Rank()
	part, err := shard.Part(rank, layers)
	if err != nil {
		return Ranks{}, err
	}
	r := Ranks{Part: part}
	_, tokens := shard.ExpertEngines(rank)
	for _, g := range []struct {
		name  string
		to    *Group
		ranks []int
	}{
		{"tensor", &r.Tensor, shard.TensorGroup(rank)},
		{"pipeline", &r.Pipeline, shard.PipelineGroup(rank)},
		{"experts", &r.Experts, shard.ExpertGroup(rank)},
		{"tokens", &r.Tokens, tokens},
	} {
		if len(g.ranks) == 1 {
			continue
		}
		if g.to.Group, err = world.Group(fmt.Sprintf("%s of %d", g.name, slices.Min(g.ranks)), g.ranks); err != nil {
			return Ranks{}, fmt.Errorf("model: %w", err)
		}
	}
	return r, nil
}

func (g Group) size() int {
	if g.Group == nil {
		return 1
	}
	return g.Size()
}

func (g Group) place() int {
	if g.Group == nil {
		return 0
	}
	return g.Rank()
}

func (g Group) allReduce(m compute.Mat) error {
	if g.Group == nil {
		return nil
	}
	return g.AllReduce(m)
}

// gatherRows returns the members' rows one after the other, in memory that to has.
func (g Group) gatherRows(to, src compute.Mat) (compute.Mat, error) {
	if g.Group == nil {
		return src, nil
	}
	return to, g.AllGatherRows(to, src)
}

func (g Group) gatherColumns(dst, src compute.Mat) error {
	if g.Group == nil {
		return nil
	}
	return g.GatherColumns(0, dst, src)
}

func (g Group) send(to int, m compute.Mat) error   { return g.Send(to, m) }
func (g Group) recv(from int, m compute.Mat) error { return g.Recv(from, m) }
