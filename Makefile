# Two commands matter: `make demo` and `make test`.  Each makes its own .venv and installs what it needs.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# Idle OpenMP threads that spin starve each other on shared cores.
export OMP_WAIT_POLICY ?= passive
export GOMP_SPINCOUNT  ?= 0

.PHONY: help demo test lint unit kernels wheel-check bench clean

help: ## Show this help
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

demo: $(STAMP) ## Answer prompts with a real model, through the queue (ARGS="--kill-worker")
	@$(BIN)/tidemill demo $(ARGS)

test: lint unit kernels ## Lint, types, contracts and the whole suite against a real Valkey
	@echo "All checks passed."

lint: $(STAMP) ## Format, lint, types, import contracts, file sizes
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python scripts/check_file_sizes.py

# Two processes: while one waits for a server or a lease, the other computes.
unit: $(STAMP) ## The test suite, without the Triton interpreter
	@$(BIN)/python -m pytest -n 2 --dist loadgroup $(ARGS)

kernels: $(STAMP) ## The Triton kernels under the interpreter (read when a kernel is decorated: own process)
	@TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernels -m interpret $(ARGS)

wheel-check: $(STAMP) ## Build the wheel, install it into an empty venv and run the demo from there
	@$(BIN)/python scripts/check_wheel.py

bench: $(STAMP) ## Engine workloads W1-W4 beside transformers' own generate
	@$(BIN)/python benchmarks/engine.py $(ARGS)

clean: ## Remove the virtual environment and caches
	@rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing Tidemill and its pinned dependencies into $(VENV) (a minute or two) ..."
	@$(PIP) install --quiet -c constraints.txt hatchling editables
	@$(PIP) install --quiet --no-build-isolation -c constraints.txt -e '.[all,dev]'
	@touch $(STAMP)
