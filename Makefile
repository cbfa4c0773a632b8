# make serve | make test are all a stranger needs; everything else is a part of one of them.
PYTHON ?= python3
VENV   ?= .venv
# A CPU build is pinned: an unpinned torch pulls gigabytes of CUDA. On a GPU machine: make setup TORCH=torch==2.11.0
TORCH  ?= torch==2.13.0
PORT   ?= 8765
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready

.PHONY: help setup serve test lint types unit docs bench clean

help:
	@echo "make serve   set up and open the discovery explorer on http://127.0.0.1:$(PORT)"
	@echo "make test    set up, then lint, types and all tests"
	@echo "make bench   set up, then every script under bench/ (long; needs SEMBLEND_TEST_DATA for real text)"
	@echo "make docs    regenerate the reference pages"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints/core.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade -c constraints/core.txt pip
	$(BIN)/python -m pip install --quiet -c constraints/core.txt "$(TORCH)"
	$(BIN)/python -m pip install --quiet -c constraints/core.txt -e ".[dev,embedder]"
	touch $(STAMP)

serve: setup
	$(BIN)/semblend serve --port $(PORT)

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
	$(BIN)/python -m semblend.reference docs/reference

bench: setup
	$(BIN)/python bench/run_all.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
