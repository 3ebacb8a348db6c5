package main

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"baton/engine"
	"baton/layout"
)

// rankFlags say which ranks of a shard a process runs.
type rankFlags struct {
	Shard  string `default:"tp=1" placeholder:"SPEC" help:"How ranks split the model, as in \"tp=2,pp=2,dp=2\"; each of the dp groups is an engine. Experts are spread by ep and expt_tp."`
	Ranks  string `placeholder:"LIST" help:"Which of the ranks run in this process, as in 0-1 or 0,2; the others run in processes of their own, with the same --leader. Default: all."`
	Leader string `placeholder:"HOST:PORT" help:"Where the processes of a shard meet. The one with rank 0 listens there and says how to run; the others need only --model, --ranks, --leader, --threads and --transfer-host."`
}

// placement reads --ranks and --leader; nil is everything here. all is how many ranks the shard has, 0 when only
// its leader knows.
func (f rankFlags) placement(all int) (*engine.Placement, error) {
	if f.Ranks == "" && f.Leader == "" {
		return nil, nil
	}
	if f.Ranks == "" || f.Leader == "" {
		return nil, fmt.Errorf("--ranks and --leader come together: which ranks run here, and where they meet the others")
	}
	if err := checkAddress("--leader", f.Leader); err != nil {
		return nil, err
	}
	var ranks []int
	for item := range strings.SplitSeq(f.Ranks, ",") {
		from, to, isRange := strings.Cut(strings.TrimSpace(item), "-")
		if !isRange {
			to = from
		}
		first, err1 := strconv.Atoi(from)
		last, err2 := strconv.Atoi(to)
		if err1 != nil || err2 != nil || first < 0 || last < first || last-first >= maxRanks {
			return nil, fmt.Errorf("--ranks %q: write it as 0-1 or 0,2; a process runs at most %d", f.Ranks, maxRanks)
		}
		for r := first; r <= last; r++ {
			ranks = append(ranks, r)
		}
	}
	slices.Sort(ranks)
	if dup := len(ranks) - len(slices.Compact(slices.Clone(ranks))); dup > 0 || len(ranks) > maxRanks {
		return nil, fmt.Errorf("--ranks %q: each rank once, at most %d", f.Ranks, maxRanks)
	}
	if last := ranks[len(ranks)-1]; ranks[0] == 0 && last >= all {
		return nil, fmt.Errorf("--ranks %q: --shard %s has ranks 0 to %d", f.Ranks, f.Shard, all-1)
	}
	return &engine.Placement{Ranks: ranks, Leader: f.Leader}, nil
}

// shape reads --shard.
func (f rankFlags) shape() (layout.Shard, error) {
	shards, err := layout.ParseShards(f.Shard)
	if err != nil {
		return layout.Shard{}, fmt.Errorf("--shard: %w", err)
	}
	if len(shards) != 1 || shards[0].Role != "" || shards[0].Ranks() > maxShardRanks {
		return layout.Shard{}, fmt.Errorf("--shard %q: it must be one shard of at most %d ranks (tp·pp·dp); its role is --role", f.Shard, maxShardRanks)
	}
	if f.Ranks == "" && shards[0].Ranks() > maxRanks {
		return layout.Shard{}, fmt.Errorf("--shard %q: %d ranks in one process; at most %d (spread them with --ranks and --leader)", f.Shard, shards[0].Ranks(), maxRanks)
	}
	return shards[0], nil
}

// maxShardRanks bounds the ranks of a shard that several processes run.
const maxShardRanks = 1024

// secureRanks checks how this process meets those of the other ranks.
func (c *engineCmd) secureRanks(sec *security, p *engine.Placement) error {
	if err := sec.reach("--leader", c.Leader); err != nil {
		return err
	}
	if err := sec.transfer("--transfer-host", c.TransferHost); err != nil {
		return err
	}
	p.Host, p.Dial, p.Accept = c.TransferHost, sec.client(), sec.server()
	return nil
}

// follow runs ranks of a shard that another process leads.
func (c *engineCmd) follow(env *environment, sec *security, base engine.Config, reg *prometheus.Registry) error {
	env.started()
	group, ctx := errgroup.WithContext(env.ctx)
	ctx, stop := context.WithCancel(ctx)
	group.Go(func() error {
		defer stop()
		return engine.Follow(ctx, base)
	})
	group.Go(func() error { return serveMetrics(ctx, sec, c.Metrics, reg, env.log) })
	return group.Wait()
}
