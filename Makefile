# Every target sets up what it needs: a fresh machine needs only make and Python >= 3.10.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs

.DEFAULT_GOAL := help
.PHONY: help demo demo-3d demo-bits test test-slow golden conformance faults same-as same-bits lint bench bench-all bench-ops bench-offload bench-checkpoint bench-activation bench-attention \
	bench-parallel bench-sequence bench-nodes bench-scale bench-experts gpu compat compat-peers compat-data compat-programs docs release clean

help: ## Show the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

demo: $(STAMP) ## Train a small GPT with ZeRO stage 3 on two processes (about 3 minutes)
	$(BIN)/python examples/train_gpt.py

demo-3d: $(STAMP) ## Train a GPT on 8 processes, 2 stages x 2 data x 2 tensor ranks, then on 3 stages, and on 2 processes (10 minutes)
	$(BIN)/python examples/pipeline_gpt.py --ranks 8 --tensor 2 --precision bf16-mixed --steps 150 --folder out/demo-3d
	$(BIN)/python examples/pipeline_gpt.py --resume --ranks 3 --stages 3 --precision bf16-mixed --steps 180 --folder out/demo-3d
	$(BIN)/python examples/pipeline_gpt.py --ranks 2 --stages 1 --precision bf16-mixed --steps 150 --folder out/demo-1d

demo-bits: $(STAMP) ## Train a GPT on 1, 2 and 4 processes to the same weights, to the bit (3 minutes)
	$(BIN)/python examples/same_bits.py

# The processes and their workers import the package and the tests: with bytecode each but the first does not compile them.
test test-slow: export PYTHONDONTWRITEBYTECODE =

test: $(STAMP) ## Run the fast tests, in three processes (they also wait)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test-slow: $(STAMP) ## Run the slow tests
	$(BIN)/python -m pytest -m slow --timeout 1200

golden: $(STAMP) ## Write what users read and files contain to tests/data/golden, lower the figures of tests/data/house.json; read the diff
	REWRITE_GOLDEN=1 $(BIN)/python -m pytest tests/config/test_wording.py tests/checkpoint/test_wording.py \
		tests/checkpoint/test_manifests.py tests/test_cli.py tests/test_house.py

conformance: $(STAMP) ## Run one contract over a Trainer, Fabric and a loop, in all rows
	$(BIN)/python -m pytest -m "not gpu" --timeout 1200 tests/conformance

SEED ?= 1

faults: $(STAMP) ## Give faults to real runs, and write a table to build/faults.md (40 minutes on an idle machine)
	@mkdir -p build
	$(BIN)/python -m tests.faults --seed $(SEED) --out build/faults.md

# After a change that must not move a bit: make same-as BASE=main; some runs only: RUNS="'stage 3' pipeline".
BASE ?= HEAD
RUNS ?=

same-as: $(STAMP) ## Compare the bits of 31 short runs, and of resumes, with those of the commit BASE (10 minutes)
	$(BIN)/python -m tests.support.same_as $(BASE) $(RUNS)

same-bits: $(STAMP) ## Compare the bits of runs with virtual ranks on 1 to 8 ranks, and of resumes on others (20 minutes)
	$(BIN)/python -m tests.support.same_bits $(RUNS)

lint: $(STAMP) ## Check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP) ## Measure step time and memory against DDP, FSDP2 and DeepSpeed
	$(BIN)/python benchmarks/step_time.py

# An interpreter with DeepSpeed, for its rows: make bench-all DEEPSPEED_PYTHON=/path/to/venv/bin/python
bench-all: $(STAMP) ## Compare with all peers in all respects: one table of ratios (20 minutes, an idle machine)
	$(BIN)/python benchmarks/bench_all.py $(if $(DEEPSPEED_PYTHON),--deepspeed-python $(DEEPSPEED_PYTHON))

bench-ops: $(STAMP) ## Measure the kernels against torch's and DeepSpeed's
	$(BIN)/python benchmarks/ops.py

bench-offload: $(STAMP) ## Measure a model of 400M parameters whose states rest in files (5 minutes, 10 GB of disk)
	$(BIN)/python benchmarks/offload.py

bench-checkpoint: $(STAMP) ## Measure saving and loading against torch.save, DCP and safetensors
	$(BIN)/python benchmarks/checkpoint.py

bench-activation: $(STAMP) ## Measure recomputing activations, and where saved inputs rest (5 minutes)
	$(BIN)/python benchmarks/activation.py --rounds 5 --threads 2

bench-attention: $(STAMP) ## Measure block-sparse attention against dense attention (10 minutes)
	$(BIN)/python benchmarks/attention.py

bench-sequence: $(STAMP) ## Measure attention of sequences that are cut over ranks, beside DeepSpeed's (10 minutes)
	$(or $(DEEPSPEED_PYTHON),$(BIN)/python) benchmarks/sequence.py

PARALLEL := $(BIN)/python benchmarks/step_time.py --peers ddp,fsdp2,lt_zero-1,lt_zero-2,lt_zero-3
bench-parallel: $(STAMP) ## Measure tensor ranks, pipelines and both, against torch's with DDP and FSDP2 (15 minutes, idle machine)
	$(PARALLEL) --ranks 4 --tensor 2
	$(PARALLEL) --ranks 4 --pipeline 2
	$(PARALLEL) --ranks 8 --tensor 2 --pipeline 2 --depth 6 --width 384

bench-nodes: $(STAMP) ## Measure steps and traffic on two simulated nodes at three link rates (20 minutes; root, iproute2)
	$(BIN)/python benchmarks/nodes.py

bench-experts: $(STAMP) ## Measure experts on 1, 2 and 4 ranks beside FSDP2, on two simulated nodes (5 minutes; root, iproute2)
	$(BIN)/python benchmarks/experts.py

bench-scale: $(STAMP) ## Measure steps and memory on 1 to 8 ranks with 10M to 400M parameters, and start-up (15 minutes)
	$(BIN)/python benchmarks/scale.py

# A machine without a network: make gpu WHEELS=DIR takes PYTHON as it is, with its torch, and the wheels of what it lacks.
# DEVICE=cpu tries all of it without a GPU; what it writes goes to build/gpu/cpu, that of a GPU to benchmarks/results.
# Some parts only: make gpu PARTS="kernels engine" (of kernels engine nccl states offload trainer bench), each within LIMIT seconds.
WHEELS ?=
DEVICE ?= cuda
PARTS ?=
LIMIT ?= 360
SITE := build/gpu/site
ifdef WHEELS
GPU_READY := $(SITE)/.installed
GPU_PYTHON = PYTHONPATH=$(CURDIR):$(CURDIR)/$(SITE) $(PYTHON)
else
GPU_READY := $(STAMP)
GPU_PYTHON = $(BIN)/python
endif

gpu: $(GPU_READY) ## On a machine with a GPU: parts of tests and measurements, and one table of claims
	$(GPU_PYTHON) benchmarks/gpu_parts.py --device $(DEVICE) --limit $(LIMIT) $(PARTS)

$(SITE)/.installed:
	mkdir -p $(SITE)
	$(PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target $(SITE) $(WHEELS)/*.whl
	@touch $@

docs: $(DOCS_STAMP) ## Write docs/config.md from the schema and the table of keys, build the documentation into site/
	$(BIN)/python -m lt_zero.config.catalog
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	if command -v node > /dev/null; then node tests/support/site_search.js site; else echo "no node: search not tried"; fi

# The wheel in a clean environment, kept in COMPAT. Another Python: PYTHON=~/.pyenv/versions/3.12.1/bin/python. Other
# versions than PINS says: WITH="torch==2.11.0 lightning==2.6.0"; the newest that pip finds: PINS=/dev/null. As on a machine
# without a compiler: COMPILER=none. Some of the tests, in how many processes: TESTS="tests/config tests/kernels" JOBS=1.
WITH ?=
PINS ?= constraints.txt
COMPILER ?=
COMPAT ?= build/compat
TESTS ?= tests
JOBS ?= 3

compat: ## Build the wheel with PYTHON, install it into a clean environment, run the fast tests against it
	rm -rf $(COMPAT)
	mkdir -p $(COMPAT)/source
	$(PYTHON) -m venv $(COMPAT)/venv
	$(COMPAT)/venv/bin/python -m pip install --quiet build
	$(COMPAT)/venv/bin/python -m build --wheel --outdir $(COMPAT) .
	for pin in $(WITH); do echo "$${pin%%[=<>]*}"; done > $(COMPAT)/free  # these pins give way
	echo packaging >> $(COMPAT)/free
	grep -v -w -f $(COMPAT)/free $(PINS) > $(COMPAT)/constraints.txt || true  # grep fails where no line is left
	wheel=$$(ls $(COMPAT)/*.whl) && $(COMPAT)/venv/bin/python -m pip install --quiet -c $(COMPAT)/constraints.txt \
		"$$wheel[dev,examples]" $(WITH)
	git ls-files -z | grep -zv '^lt_zero/' | xargs -0 cp --parents -P -t $(COMPAT)/source  # not the package itself
	COMPILER=$(COMPILER) JOBS=$(JOBS) sh tests/support/compat.sh $(COMPAT) $(TESTS)

PEERS ?= build/peers

compat-peers: ## Run the slow tests of libraries that drive DeepSpeed (transformers, Accelerate, peft, TRL), of torchao and Ray, pinned
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet -c constraints.txt -e ".[dev]" -r constraints-peers.txt
	$(PEERS)/bin/python -m pytest -m slow --timeout 1200 tests/deepspeed tests/regressions/test_torchao.py tests/test_ray.py \
		tests/core/engine/test_compiled_transformers.py

DATA ?= build/data

# litdata installs torchvision, which its loaders do not need, and which Lightning imports where it is there: that of PyPI
# fails beside a torch for CPUs only.
compat-data: ## Run the slow tests of data that resumes with torchdata, litdata, datasets and webdataset, pinned
	$(PYTHON) -m venv $(DATA)
	grep -v '^python-dateutil' constraints.txt > $(DATA)/constraints.txt
	$(DATA)/bin/python -m pip install --quiet -c $(DATA)/constraints.txt -e ".[dev]" -r constraints-data.txt
	$(DATA)/bin/python -m pip uninstall --quiet --yes torchvision
	$(DATA)/bin/python -m pytest -m slow --timeout 1200 -k "torchdata or litdata or datasets or webdataset" \
		tests/training/lightning/test_resumed_data.py

PROGRAMS ?= build/programs

compat-programs: ## Run a tiny training of ms-swift, LLaMA-Factory (stages 2 and 3) and axolotl (stage 3), each in an environment of its own
	mkdir -p $(PROGRAMS)
	tests/support/programs.sh $(PYTHON) $(PROGRAMS) swift llamafactory axolotl

DIST := dist
RELEASE := build/release

# The wheel for any machine compiles kernels on first use; that for this kind of machine has those of the CPU and, if there
# is an nvcc, which needs no GPU, those of CUDA for all supported GPUs (CUDA=--no-cuda leaves them out). auditwheel names
# the oldest systems that can load them.
CUDA ?= $(if $(or $(NVCC),$(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc)),--cuda,--no-cuda)
# PROJECT_URL=https://HOST/ORG/lt_zero, where the repository is published: package indexes need absolute links.
PROJECT_URL ?=
release: $(STAMP) ## Build dist/: sdist, wheel, and a wheel with kernels (CUDA's, too, if there is nvcc); install each, run a step
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[release]"
	rm -rf $(DIST) $(RELEASE)
	mkdir -p $(RELEASE)/source
	git ls-files -z | xargs -0 cp --parents -P -t $(RELEASE)/source
	$(if $(PROJECT_URL),$(BIN)/python -m tests.support.published $(RELEASE)/source $(PROJECT_URL))
	$(BIN)/python -m build --outdir $(DIST) $(RELEASE)/source
	rm -rf $(RELEASE)/source
	tar -xf $(DIST)/*.tar.gz -C $(RELEASE) --strip-components 1
	$(BIN)/lt-zero ops build $(CUDA) --cache $(RELEASE)/lt_zero/csrc/built
	find $(RELEASE)/lt_zero/csrc/built -type f ! -name '*.so' -delete
	$(BIN)/python -m build --wheel --outdir $(RELEASE)/any $(RELEASE)
	$(BIN)/python -m wheel tags --remove --platform-tag linux_$$(uname -m) $(RELEASE)/any/*.whl
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/auditwheel repair --wheel-dir $(DIST) $(RELEASE)/any/*.whl
	$(BIN)/python -m twine check --strict $(DIST)/*
	for file in $(DIST)/*; do $(BIN)/python -m tests.support.installed $$file || exit 1; done

clean: ## Remove the virtual environment, caches and outputs
	rm -rf $(VENV) build dist out site lightning_logs *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python >= 3.10 is needed: make PYTHON=...")'
	$(BIN)/python -c '' 2> /dev/null || $(PYTHON) -m venv $(VENV)  # one that works stays: venv writes into its files
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev,lint,examples]"
	@touch $@

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	@touch $@
