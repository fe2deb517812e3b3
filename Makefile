# Every target makes its own environment first; Python 3.11 to 3.13 is all that has to be there.
VENV ?= .venv
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null \
	&& { echo $$python; break; }; done)

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := $(wildcard autotp passes costmodel examples tests benchmarks docs/hooks.py)
TORCHRUN := $(BIN)/torchrun --standalone --nproc-per-node 4

# One thread a process: the ranks share the cores, and the order of float sums stays the same.
export OMP_NUM_THREADS := 1
# What is compiled on import is kept.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test slow exact newest newest-torch tables predictions overlap docs lint format clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    train a small GPT, then a small U-Net, on 4 processes; compare with one process"
	@echo "make test    tests that meet every rule, family and command once (at most 8 minutes on 2 free cores)"
	@echo "make slow    heavier ones: several processes for long, memory bounds (minutes)"
	@echo "make exact   all other tests: the whole matrix of models, strategies and meshes, and what is slow (hours)"
	@echo "make newest  tests of what depends on torch, with torch $(NEWEST), which brings 5 GB for GPUs"
	@echo "make tables  write the tables in docs/ that need no cluster anew (minutes)"
	@echo "make predictions  measure steps on emulated clusters, as root (half an hour)"
	@echo "make overlap  measure overlap, and autotp beside DDP, FSDP2 and tensor parallel, as root (two hours)"
	@echo "make docs    build the documentation site into build/site"
	@echo "make lint    ruff, mypy, import-linter"
	@echo "make format  let ruff format the sources"
	@echo "make clean   remove the environment and every cache"

# Python compiles what is imported, which is a small part of what is installed: without that, this takes half the time.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11, 3.12 or 3.13 found; say where: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[test,examples]'
	@touch $@

demo: $(STAMP)
	$(TORCHRUN) examples/train_gpt.py
	$(TORCHRUN) examples/train_unet.py

test: $(STAMP)
	$(BIN)/python -m pytest

slow: $(STAMP)
	$(BIN)/python -m pytest -m "slow and not exact"

exact: $(STAMP)
	$(BIN)/python -m pytest -m "exact or slow" --timeout 1200

# The newest release of torch that is supported, in front of that of constraints.txt.
NEWEST ?= 2.15.0
OTHER := $(abspath $(VENV))/torch-$(NEWEST)

$(OTHER): | $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --target $@.part torch==$(NEWEST)
	mv $@.part $@

newest-torch: $(OTHER)

newest: $(OTHER)
	PYTHONPATH=$(OTHER) $(BIN)/python -m pytest tests/passes/test_torch_internals.py tests/passes/capture \
		tests/whole/test_corners.py tests/autotp/runtime/test_submodule.py

tables: $(STAMP)
	for name in volumes rediscovery lower_bound trends memory planning_time planning_scale canonical walkthrough; do $(BIN)/python -m benchmarks.$$name --write || exit 1; done

predictions: $(STAMP)
	$(BIN)/python -m benchmarks.predictions --write

overlap: $(STAMP)
	$(BIN)/python -m benchmarks.overlap --write
	$(BIN)/python -m benchmarks.peers --write

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo "open build/site/index.html, or with search: $(BIN)/python -m http.server --directory build/site"

lint: $(STAMP)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
