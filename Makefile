# From a fresh clone with only make and Python >= 3.11. Each target first brings .venv in line with requirements.lock.
#   make PYTHON=/path/to/python ...   another interpreter
#   make train ARGS="--steps 40"   arguments for run.py; for make test: arguments for pytest

PYTHON ?=
VENV ?= .venv
ARGS ?=
MODEL ?= models/gpt_small.toml
MESH ?= meshes/cpu_2x.toml
BIN := $(VENV)/bin
export PYTHON VENV

.PHONY: help setup train test lint lock
.DEFAULT_GOAL := help

help:
	@echo "make train   train the small GPT on two groups of CPU devices (MODEL=, MESH=, ARGS='--steps 40')"
	@echo "make test    run the tests (ARGS= goes to pytest)"
	@echo "make lint    ruff, ruff format and pyrefly"
	@echo "make setup   only create or refresh $(VENV) from requirements.lock (PYTHON=, VENV=)"
	@echo "make lock    resolve requirements.lock again from pyproject.toml (needs uv; ARGS=--upgrade takes newer releases)"

setup:
	@sh .ci/setup.sh

train: setup
	$(BIN)/python run.py train $(MODEL) --mesh $(MESH) $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

lock:
	@PATH="$(CURDIR)/$(BIN):$$PATH"; command -v uv >/dev/null || \
		{ echo "make lock needs uv: $(BIN)/python -m pip install uv" >&2; exit 1; }; \
	UV_CUSTOM_COMPILE_COMMAND="make lock" uv pip compile --quiet --universal --python-version 3.11 \
		--no-config --generate-hashes --extra dev $(ARGS) pyproject.toml --output-file requirements.lock
