# The few commands people type. `make demo` and `make test` need Python 3.11 and a package index, nothing else.
PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python)
VENV := .venv
BENCH_VENV := .venv-bench
PIP := -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help demo test test-slow check bench clean

help:
	@echo "make demo   installs, trains a model on 5,000 rotated digits (minutes), prints its audit, writes figures to demo/"
	@echo "make test   all checks: lint, types, tests"
	@echo "make test-slow  exactness of the largest models as well (ten minutes, 16 GB)"
	@echo "make check  lint and types only"
	@echo "make bench  speed and memory of our algorithms, and side by side with escnn (compiles it: needs a Fortran compiler)"
	@echo "make clean  remove what these commands made"

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP) -e ".[train,export,dev]"
	@touch $@

demo: $(VENV)/installed
	rm -rf demo
	$(VENV)/bin/revit train demo --out demo
	@echo
	@echo "Try next:"
	@echo "  $(VENV)/bin/revit eval demo --split val"
	@echo "  $(VENV)/bin/revit data rotmnist5k --sheet demo/samples.png"
	@echo "  $(VENV)/bin/revit train folder --data-root FOLDER_WITH_ONE_SUBFOLDER_PER_CLASS --out runs/mine"

check: $(VENV)/installed
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

test: check
	$(VENV)/bin/python -m pytest

test-slow: $(VENV)/installed
	$(VENV)/bin/python -m pytest -m slow

# escnn needs an older numpy than the embedded digits do, so the benchmarks have an environment of their own.
$(BENCH_VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python $(PIP) -e . pytest hypothesis matplotlib
	@command -v gfortran > /dev/null || echo "no gfortran: escnn needs it to compile (Debian: apt-get install gfortran)"
	$(BENCH_VENV)/bin/python $(PIP) escnn
	@touch $@

bench: $(BENCH_VENV)/installed
	$(BENCH_VENV)/bin/python -m pytest tests/test_escnn_parity.py
	$(BENCH_VENV)/bin/python benchmarks/algorithms.py
	$(BENCH_VENV)/bin/python benchmarks/run.py

clean:
	rm -rf $(VENV) $(BENCH_VENV) demo build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
