# make compare   trains one small model in BF16, FP8 and NVFP4 and writes the report to runs/compare
# make benchmark times layers and quantizers beside their rivals (qwix and torchao where installed)
# make test      runs the tests; make test TESTS="tests/test_nnx.py -k shared" runs some
# make kernels-check compiles GPU kernels for H200 and B200, without either, and checks what came out
# make lint      ruff and mypy
# make docs      renders the documentation to build/docs; a warning is an error
# Each sets up the virtual environment it needs, and again only when pyproject.toml has changed.

PYTHON ?= python3
VENV ?= .venv
CUDA_VENV ?= .venv-cuda
EXTRA ?= dev
BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: help setup compare benchmark test kernels-check lint docs format clean

help:
	@sed -n '/^$$/q; s/^# //p' $(firstword $(MAKEFILE_LIST))

setup: $(READY)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "fp4jax needs Python 3.11 or newer; '$(PYTHON)' is" \
	    "$$($(PYTHON) --version 2>&1). Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRA)]'
	@touch $@

# XLA takes a fresh half gigabyte for each step: with huge pages most of its page faults go away.
compare: $(READY)
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(BIN)/python -m experiments.compare --out runs/compare

benchmark: $(READY)
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(BIN)/python -m experiments.benchmark linear
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(BIN)/python -m experiments.benchmark quantize
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(BIN)/python -m experiments.benchmark step

test: $(READY)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile $(TESTS)

# An environment of its own: with the plugin, all other programs would look for a GPU.
kernels-check:
	@$(MAKE) --no-print-directory setup VENV=$(CUDA_VENV) EXTRA=kernels
	$(CUDA_VENV)/bin/python -m experiments.kernels_check

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)
	$(BIN)/sphinx-build -W --keep-going --quiet docs build/docs

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(CUDA_VENV) runs build *.egg-info
