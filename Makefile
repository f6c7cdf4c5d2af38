# Everything runs in .venv, which the first target that needs it creates from pyproject.toml and constraints.txt.
# Needed beforehand: make, and Python 3.11 or newer with its venv module (make PYTHON=python3.12 ... picks another).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
# Test processes, one torch thread each (tests/conftest.py); more than four mostly import torch.
TEST_PROCESSES ?= auto --maxprocesses=4
# What `make test` and `make slow` run, and options for pytest, as in: make test TESTS=tests/family ARGS=-x
TESTS ?=
# What `make test-versions` runs: the parts that depend on the version of torch or transformers. An empty TORCH or
# TRANSFORMERS means the newest.
VERSION_TESTS := tests/family tests/losses tests/layers tests/backends tests/integrations/huggingface
TORCH ?=
TRANSFORMERS ?=
ARGS ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv browser demo test test-all test-versions mutants test-gpu slow lint format types imports examples bench-cpu bench-gpu bench-docs bench-huggingface bench-classifiers bench-lm reproduction-docs choosing-docs architecture-docs transcripts screenshots docs docs-serve build package check clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1@\2/p' $(MAKEFILE_LIST) | awk -F@ '{ printf "%-18s %s\n", $$1, $$2 }'

venv: $(VENV)/.installed-dev ## create .venv with the package and all development tools

demo: $(VENV)/.installed-plot,lm,report ## the bottleneck in three minutes: tables, pictures and a page
	$(BIN)/python -m sigsoftmax demo

test: $(VENV)/.installed-dev ## the quick tests, with every pair of values of each grid: minutes
	$(PYTEST) -n $(TEST_PROCESSES) $(ARGS) $(TESTS)

test-all: $(VENV)/.installed-dev ## all tests that need no GPU: grids whole, and the slow ones
	SIGSOFTMAX_ALL_TESTS=1 $(PYTEST) -n $(TEST_PROCESSES) $(ARGS) $(TESTS)
	SIGSOFTMAX_ALL_TESTS=1 $(PYTEST) -m slow $(ARGS) $(TESTS)

slow: $(VENV)/.installed-dev ## the tests marked slow
	$(PYTEST) -m slow $(ARGS) $(TESTS)

test-versions: ## the core and Hugging Face with other versions: make test-versions TORCH===2.11.0 TRANSFORMERS===5.17.0
	$(PYTHON) -m venv .venv-versions
	.venv-versions/bin/python -m pip install --disable-pip-version-check --quiet \
	  'torch$(TORCH)' 'transformers$(TRANSFORMERS)' -e '.[hf]' hypothesis mpmath peft pillow pytest pytest-xdist
	.venv-versions/bin/python -m pytest -n $(TEST_PROCESSES) $(ARGS) $(VERSION_TESTS)

mutants: $(VENV)/.installed-dev ## which small defects the tests notice: about an hour
	$(BIN)/python .ci/mutants.py $(ARGS)

test-gpu: ## the tests that need a GPU, with the Python at hand; nothing is installed: minutes
	$(PYTHON) .ci/test_gpu.py $(ARGS)

browser: $(VENV)/.installed-dev ## a Chromium for the tests of the report, where there is none
	@command -v chromium chromium-browser google-chrome >/dev/null \
	  || timeout 300 $(BIN)/playwright install chromium >/dev/null 2>&1 \
	  || { [ "$$(id -u)" = 0 ] && timeout 300 sh -c 'apt-get -qq update && apt-get -qq install -y chromium' >/dev/null 2>&1; } \
	  || echo "No browser could be installed: the tests that open a page are skipped."

lint: $(VENV)/.installed-dev ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-dev ## ruff: put the format right, and what rules can be put right safely
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.installed-dev ## mypy, strict, over src
	$(BIN)/mypy

imports: $(VENV)/.installed-dev ## import-linter: the direction of imports
	$(BIN)/lint-imports

examples: $(VENV)/.installed-dev ## run every example
	@set -e; for example in examples/*.py; do echo "== $$example"; $(BIN)/python "$$example"; done

bench-cpu: $(VENV)/.installed-dev ## speed and memory on this CPU, side by side with plain torch
	$(BIN)/python benchmarks/cpu.py $(ARGS)

bench-gpu: $(VENV)/.installed-dev ## speed, memory and gradient errors on a CUDA device, with torch and peers
	$(BIN)/python benchmarks/gpu.py $(ARGS)

bench-docs: $(VENV)/.installed-dev ## tables and pictures of speed and memory on all pages, from benchmarks/records
	$(BIN)/python benchmarks/write_docs.py $(ARGS)
	$(BIN)/python benchmarks/write_docs.py --records benchmarks/records/huggingface --page docs/huggingface.md $(ARGS)
	$(BIN)/python benchmarks/write_overview.py $(ARGS)
	$(BIN)/python benchmarks/classifiers.py --docs $(ARGS)
	$(BIN)/python benchmarks/write_choosing.py $(ARGS)
	$(BIN)/python benchmarks/write_records.py $(ARGS)

bench-huggingface: $(VENV)/.installed-dev ## a training step of a patched Hugging Face model beside the plain one
	$(BIN)/python benchmarks/huggingface.py $(ARGS)

bench-classifiers: $(VENV)/.installed-dev ## heads of a digit classifier with few hidden units: about an hour of one core
	$(BIN)/python benchmarks/classifiers.py $(ARGS)

bench-lm: $(VENV)/.installed-dev ## the first epochs of the paper's recipes on a CUDA device: hours on a small one
	$(BIN)/python benchmarks/language_models.py times bf16 mixtures dynamic ranks float32 $(ARGS)

reproduction-docs: $(VENV)/.installed-dev ## tables and pictures of docs/reproduction.md and the README, from results
	$(BIN)/python benchmarks/write_reproduction.py $(ARGS)
	$(BIN)/python benchmarks/write_overview.py $(ARGS)
	$(BIN)/python benchmarks/write_records.py $(ARGS)

choosing-docs: $(VENV)/.installed-dev ## tables of docs/choosing.md, from results and benchmarks/records
	$(BIN)/python benchmarks/write_choosing.py $(ARGS)
	$(BIN)/python benchmarks/write_records.py $(ARGS)

architecture-docs: $(VENV)/.installed-dev ## pictures of docs/architecture.md, from the import contract
	$(BIN)/python benchmarks/architecture_pictures.py

transcripts: $(VENV)/.installed-dev ## what the commands of audit.md, sweeps.md and distributed.md print: minutes
	$(BIN)/python benchmarks/write_transcripts.py $(ARGS)

screenshots: $(VENV)/.installed-dev browser ## pictures of a report and of an audit for the README: minutes
	$(BIN)/python benchmarks/screenshots.py $(ARGS)

# The variable silences a notice about another generator, which strict mode would not count, but readers would wonder.
docs: $(VENV)/.installed-dev ## the documentation site, in site/; a broken link or anchor fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

docs-serve: $(VENV)/.installed-dev ## the documentation site at localhost:8000, built anew at every change
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve $(ARGS)

build: $(VENV)/.installed-dev ## source archive and wheel, in dist/
	rm -rf dist
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m build

package: build ## build, check the archives, and try the wheel in a clean environment
	$(BIN)/twine check --strict dist/*
	$(BIN)/python .ci/try_package.py $(ARGS)

check: lint types imports test examples ## all that must pass before a change is handed in

clean: ## remove .venv, caches and builds
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "sigsoftmax needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
	  "name another: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One stamp for each extra. A version that changes in either file installs anew.
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV): the first time takes minutes, torch is large."
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[$*]'
	@touch $@
