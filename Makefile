# Every target but the help works in .venv, which is made from requirements.lock when needed.

PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
CONFIG ?= configs/demo.toml
ARGS ?=

BIN := .venv/bin

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help setup demo train test check bench ci

# The parallelism is between processes and threads of our own: one thread each inside an op.
demo test bench: export OMP_NUM_THREADS ?= 1

help:
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-7s %s\n", $$1, $$2 }' Makefile

setup: .venv/.installed ## make .venv with the pinned environment and twobw in it

demo: .venv/.installed ## train the small demo model by pipeline and sample from it
	$(BIN)/twobw train configs/demo.toml

train: .venv/.installed ## train CONFIG=configs/demo.toml, with ARGS="..." passed on
	$(BIN)/twobw train $(CONFIG) $(ARGS)

test: .venv/.installed ## run the tests, with ARGS="..." passed to pytest
	$(BIN)/pytest $(ARGS)

check: .venv/.installed ## format, lint, types and the direction of imports
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

bench: .venv/.installed ## measure throughput, with ARGS="..." passed on
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python benchmarks/throughput.py $(ARGS)

ci: check test demo ## what CI runs: check, test, demo

# Each stamp is written last, so an interrupted creation starts over.
.venv/.locked: requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo 'twobw needs Python 3.11 or newer: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@echo 'Installing the pinned environment into .venv; PyTorch makes this take a minute or more.'
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet -r requirements.lock
	@touch $@

.venv/.installed: .venv/.locked pyproject.toml
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	$(BIN)/python -m pip check
	@touch $@
