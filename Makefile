# The two commands that matter are `make run` and `make test`; `make help` lists the rest.
export GOTOOLCHAIN := go1.27.3
export CGO_ENABLED ?= 0

.DEFAULT_GOAL := help
.PHONY: help build run model test race lint sim sim-mutants chaos soak fuzz bench bench-handoff bench-relay generate clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: ## bin/baton, one static binary
	go build -trimpath -buildvcs=auto -o bin/baton ./cmd/baton

model: ## get SmolLM2-135M-Instruct into the cache, once
	@scripts/fetch-smollm2 >/dev/null

LISTEN ?= 127.0.0.1:8000
run: build model ## serve SmolLM2 at LISTEN with prefill and decode apart, ask it a question, stay up
	@bin/baton --log-level=warn serve --model "$$(scripts/fetch-smollm2)" --served-model-name smollm2-135m-instruct --listen "$(LISTEN)" \
	  --ask "What is the capital of France?"

test: build model lint ## everything that must hold, in a few minutes
	go test -timeout 30m ./...
	$(MAKE) race

race: ## the packages that own goroutines, under the race detector
	CGO_ENABLED=1 go test -timeout 30m -race -short ./collective/... ./coordinator/... ./engine/... ./frontend/... ./handoff/... ./kvcache/... ./leg/... ./loadgen/... ./mtls/... ./route/... ./transfer/... ./wire/...

SEEDS ?= 2000
sim: ## the whole protocol in virtual time, under faults: SEEDS random runs
	go run ./internal/sim/cmd -seeds $(SEEDS)

sim-mutants: ## plant faults, one at a time: the simulator must find each
	scripts/sim-mutants

PAIRS ?= 200
soak: ## PAIRS random pairs of layouts: transformers' tokens, the bits of one rank
	go test ./cmd/baton -run 'TestLayouts$$' -pairs $(PAIRS) -layout-seed $(SEED) -timeout 2h

SECONDS ?= 180
SEED ?= 1
chaos: build ## kill, stop and restart real processes under load, for SECONDS
	go run ./internal/chaos/cmd -seconds $(SECONDS) -seed $(SEED)

SOAK ?= 0
bench-handoff: build ## the handoff against memcpy and bare TCP, its way through processes, the coordinator; SOAK=1000000 watches memory
	go test -run '^$$' -bench BenchmarkCore -benchtime 1s ./coordinator
	go run ./internal/bench/cmd -soak $(SOAK)

JSON ?= false
bench-relay: ## what a request costs our relay, a bare one of Go's and one of aiohttp's; JSON=true for JSON
	go run ./internal/bench/relay compare --json=$(JSON)

lint: ## formatting, vet, staticcheck
	@out=$$(gofmt -l $$(git ls-files '*.go')); if [ -n "$$out" ]; then echo "not gofmt-ed: $$out"; exit 1; fi
	go vet ./...
	go tool staticcheck ./...

FUZZTIME ?= 20s
fuzz: ## every fuzzer, FUZZTIME each
	scripts/fuzz $(FUZZTIME)

bench: ## Go benchmarks of kernels, tokenizers, messages, transfers, caches; two ranks against one
	go test -run '^$$' -bench . ./collective ./compute/cpu ./text ./wire ./transfer/... ./kvcache ./layout ./route ./coordinator
	go test -run '^$$' -bench . -benchtime 50x ./model

generate: ## msgpack code and assembly
	go generate ./...

clean: ## what make build made
	rm -rf bin
