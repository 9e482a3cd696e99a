# Everything a checkout can do. Needs make and Python 3.11 or newer; each target installs the rest into .venv first.
#
#   PYTHON=...       the Python to build .venv with (default: python3.11, else python3)
#   BENCH=...        scripts in bench/ for `make bench` (default: peers): make bench BENCH="overhead planning"
#   PYTEST_ARGS=...  more arguments for pytest: make test PYTEST_ARGS="-k units -x"
#   MUTANTS_ARGS=... arguments for bench/mutants.py: make mutants MUTANTS_ARGS="--seed 7 --only planner"

PYTHON ?= $(shell for name in python3.11 python3; do $$name -c '' 2>/dev/null && echo $$name && break; done)
BENCH ?= peers
VENV := .venv
ifeq ($(OS),Windows_NT)
BIN := $(VENV)/Scripts
EXE := .exe
else
BIN := $(VENV)/bin
EXE :=
endif
READY := $(VENV)/.ready
UNFINISHED := $(VENV)/.unfinished

.DEFAULT_GOAL := help
.PHONY: help demo test slow integrations lint docs pictures bench mutants clean

help: ## say what there is (the default)
	@sed -n 's/^\([a-z]*\):[^#]*## */  make \1\t/p' $(MAKEFILE_LIST) | expand -t 14

demo: $(READY) ## a real model on real text: its memory before and after, and the proof
	$(BIN)/lowtide demo

test: $(READY) ## run the tests that take seconds each
	$(BIN)/pytest -n auto --maxprocesses 4 -m "not slow" $(PYTEST_ARGS)

slow: $(READY) ## run the tests that take longer
	$(BIN)/pytest -n auto --maxprocesses 4 -m slow $(PYTEST_ARGS)

integrations: $(READY) ## run the tests of the callbacks, with the packages that they are for
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -c constraints-integrations.txt -e '.[integrations]'
	$(BIN)/pytest tests/integrations $(PYTEST_ARGS)

lint: $(READY) ## check style, format, types, layers and prose
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python tools/prose.py

docs: $(READY) ## build the documentation site into build/site; a broken link is an error
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -c constraints-docs.txt -e '.[docs]'
	$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going docs build/site

pictures: $(READY) ## make the pictures of README and docs again; needs Chromium
	$(BIN)/python tools/doc_pictures.py

bench: $(READY) ## measure Lowtide beside the others: docs/benchmarks.md
	@set -e; for name in $(BENCH); do echo "== bench/$$name.py"; $(BIN)/python "bench/$$name.py"; done

mutants: $(READY) ## put 200 small faults into the source, and list those that the tests let through
	$(BIN)/python bench/mutants.py $(MUTANTS_ARGS)

clean: ## remove .venv and every cache
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name .git -prune -o -name __pycache__ -type d -exec rm -rf {} +

# READY is written when an install is through, so a second run has nothing to do. UNFINISHED is there while one runs: a
# .venv that still has it was cut off and may be broken anywhere, so it is made anew, as is one without a working pip.
# The constraints fix every version, torch's among them.
$(READY): pyproject.toml constraints.txt $(BIN)/python$(EXE)
	@if [ -z "$(PYTHON)" ]; then \
	  echo "lowtide needs Python 3.11 or newer, and found no python3.11 or python3." >&2; \
	  echo "  Install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 2; \
	fi
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "lowtide needs Python 3.11 or newer; $(PYTHON) is $$("$(PYTHON)" --version 2>&1)." >&2; \
	  echo "  Install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 2; }
	@if [ -e $(UNFINISHED) ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  echo "making $(VENV) with $(PYTHON); the first time takes some minutes, for torch is large"; \
	  rm -rf $(VENV) && mkdir $(VENV) && touch $(UNFINISHED) && "$(PYTHON)" -m venv $(VENV); \
	fi
	@touch $(UNFINISHED) && rm -f $(READY)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[demo,pictures,dev]'
	@rm -f $(UNFINISHED) && touch $(READY)

# A missing or dangling interpreter (first run; the system's Python was replaced) makes READY stale. No recipe: READY's
# own makes .venv.
$(BIN)/python$(EXE):
