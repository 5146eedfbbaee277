# `make weather` and `make test` each work alone in a fresh clone: they make the environment they need.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH  ?= torch==2.13.0
RANKS  ?= 4

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.jigsaw-installed

# One thread a rank: the ranks are the parallelism, and more threads than cores make every rank wait.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup weather weather-025 medical nginx test check bench clean

help: ## show these targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP) ## make .venv with jigsaw, its extras and the developers' tools

# torch first and pinned, so that nothing that follows chooses another one.
$(STAMP): pyproject.toml
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "jigsaw needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[all,dev]"
	@touch $@

weather: setup ## train the weather example on one rank, then on 4 of this machine (RANKS=2 for two)
	$(BIN)/python examples/weather/train.py
	$(BIN)/torchrun --nproc-per-node $(RANKS) examples/weather/train.py

weather-025: setup ## one training step on generated 0.25 degree data, with the bytes read and the memory of each rank
	$(BIN)/torchrun --nproc-per-node $(RANKS) examples/weather/quarter_degree.py

# The tests read from a real web server. It is no Python package; where it is absent Debian's is installed.
nginx:
	@command -v nginx >/dev/null || test -x /usr/sbin/nginx || { \
		test "$$(id -u)" = 0 && sudo= || sudo=sudo; \
		$$sudo apt-get update -qq && $$sudo apt-get install -y -qq --no-install-recommends nginx-light >/dev/null; }

test: setup nginx ## the tests, without the slow ones
	$(BIN)/python -m pytest -m "not slow"

check: setup nginx ## lint, types, layers and all tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -m pytest

bench: setup ## every benchmark, one JSON object a case (an hour)
	$(BIN)/python benchmarks/layers.py --ranks 2
	$(BIN)/python benchmarks/read.py

medical: setup ## train on crops of volumes on two ranks, then infer by sliding windows
	$(BIN)/torchrun --nproc-per-node 2 examples/medical/train.py

clean: ## remove what the tools left, not .venv
	rm -rf .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
