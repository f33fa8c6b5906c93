# The few commands people type. `make demo` and `make test` need Python 3.11 and a package index, nothing else.
PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python)
VENV := .venv
BENCH_VENV := .venv-bench
AUDIT_VENV := .venv-audit
DOCS_VENV := .venv-docs
PIP := -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help demo docs test test-slow coverage check faults mutants audit-deps lock bench clean

help:
	@echo "make demo   installs, trains a model on 5,000 rotated digits (minutes), prints its audit, writes figures to demo/"
	@echo "make test   all checks: lint, types, tests"
	@echo "make test-slow  exactness of the largest models as well (ten minutes, 16 GB)"
	@echo "make coverage  the tests again, and which lines of revit/ they run (at least 90 %)"
	@echo "make check  lint and types only"
	@echo "make docs   the documentation, as pages in site/"
	@echo "make faults  kills, hostile files, full disks, load, a million mutations: all counts (an hour), results/faults.json"
	@echo "make mutants  are small changes in the mathematics noticed by the tests? results/mutants.json"
	@echo "make audit-deps  known vulnerabilities of the installed packages"
	@echo "make lock  requirements.lock: every package of the tests with its SHA-256"
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

coverage: $(VENV)/installed
	$(VENV)/bin/coverage erase
	$(VENV)/bin/coverage run -m pytest
	$(VENV)/bin/coverage combine --quiet
	$(VENV)/bin/coverage report --skip-covered --sort cover

test-slow: $(VENV)/installed
	$(VENV)/bin/python -m pytest -m slow

$(DOCS_VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python $(PIP) zensical
	@touch $@

# Pictures of results lie beside the results; on the site they are below its pages.
docs: $(DOCS_VENV)/installed
	rm -rf build/docs site
	mkdir -p build/docs/pictures
	cp docs/*.md docs/pages.css build/docs
	cp docs/pictures/*.png results/figures/*.png build/docs/pictures
	sed -i 's#(\.\./results/figures/#(pictures/#' build/docs/*.md
	$(DOCS_VENV)/bin/zensical build --clean --strict

faults: $(VENV)/installed
	$(VENV)/bin/python -m tests.faults.run --out results/faults.json

mutants: $(VENV)/installed
	$(VENV)/bin/python -m tests.mutants --out results/mutants.json

# Wheels for the CPU carry a local version (+cpu) that no database knows.
audit-deps: $(VENV)/installed
	$(PYTHON) -m venv $(AUDIT_VENV)
	$(AUDIT_VENV)/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	$(VENV)/bin/python -m pip freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//' > $(AUDIT_VENV)/installed.txt
	$(AUDIT_VENV)/bin/pip-audit --strict --no-deps --disable-pip -r $(AUDIT_VENV)/installed.txt

# The hashes are those of the files that pip chooses here: Linux x86_64, CPython 3.11, torch for the CPU.
lock: $(VENV)/installed
	$(VENV)/bin/python $(PIP) --dry-run --ignore-installed --report $(VENV)/report.json ".[train,export,dev]"
	$(VENV)/bin/python -c "$$LOCK" $(VENV)/report.json > requirements.lock

define LOCK
import json, sys
for item in sorted(json.load(open(sys.argv[1]))["install"], key=lambda item: item["metadata"]["name"].lower()):
    if hashes := item["download_info"].get("archive_info", {}).get("hashes"):
        print(f"{item['metadata']['name'].lower()}=={item['metadata']['version']} --hash=sha256:{hashes['sha256']}")
endef
export LOCK

# escnn needs an older numpy than the embedded digits do, so the benchmarks have an environment of their own.
$(BENCH_VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python $(PIP) -e . pytest hypothesis matplotlib
	@command -v gfortran > /dev/null || echo "no gfortran: escnn needs it to compile (Debian: apt-get install gfortran)"
	$(BENCH_VENV)/bin/python $(PIP) escnn
	@touch $@

bench: $(BENCH_VENV)/installed $(VENV)/installed
	$(BENCH_VENV)/bin/python -m pytest tests/test_escnn_parity.py
	$(BENCH_VENV)/bin/python benchmarks/algorithms.py
	$(BENCH_VENV)/bin/python benchmarks/layouts.py
	$(BENCH_VENV)/bin/python benchmarks/shapes.py
	$(BENCH_VENV)/bin/python benchmarks/stored_scores.py
	$(BENCH_VENV)/bin/python benchmarks/chains.py
	$(BENCH_VENV)/bin/python benchmarks/profile_step.py
	$(BENCH_VENV)/bin/python benchmarks/limits.py
	$(BENCH_VENV)/bin/python benchmarks/compiled.py
	$(VENV)/bin/python benchmarks/small_models.py
	$(VENV)/bin/python benchmarks/reduced_keys.py
	$(VENV)/bin/python benchmarks/relative_attention.py
	$(VENV)/bin/python benchmarks/deployment.py
	$(VENV)/bin/python benchmarks/bit_exact.py
	$(BENCH_VENV)/bin/python benchmarks/run.py
	$(BENCH_VENV)/bin/python benchmarks/run.py --settings "p4m, four stages, 224 px" --out benchmarks/results/four_stages.json

clean:
	rm -rf $(VENV) $(BENCH_VENV) $(AUDIT_VENV) $(DOCS_VENV) .cache demo site build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
