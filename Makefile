# Every target makes its own environment (once, in .venv) from the pins in requirements/.
# torch goes first and alone, pinned: asked for by another package it may come as a CUDA build of several gigabytes.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
TORCH ?= torch==2.13.0
WORKERS ?= 2
PYTEST_ARGS ?= -n $(WORKERS) --dist loadfile

export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help env demo test deep check format lint types contracts wheel bench clean

help: ## List the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

env: $(READY) ## Make the environment

$(READY): requirements/all.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -r requirements/all.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $(READY)

demo: $(READY) ## Train a GPT-2-style model on four processes and compare it with one
	$(BIN)/torchrun --nproc-per-node 4 examples/train_gpt.py

test: $(READY) ## Run the tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)

deep: $(READY) ## Run the property tests with thousands of examples
	$(BIN)/python -m pytest --hypothesis-profile=deep $(PYTEST_ARGS)

check: format lint types contracts wheel test ## Everything that must pass before a change goes in

format: $(READY) ## Check the format
	$(BIN)/ruff format --check .

lint: $(READY) ## Check the style
	$(BIN)/ruff check .

types: $(READY) ## Check the types
	$(BIN)/mypy

contracts: $(READY) ## Check that nothing imports upward
	$(BIN)/lint-imports

wheel: $(READY) ## Build the wheel and check what is in it
	rm -rf build dist
	$(BIN)/python -m build --wheel --no-isolation --outdir dist . > /dev/null
	$(BIN)/check-wheel-contents dist/*.whl

bench: $(READY) ## Measure how fast plans are found
	$(BIN)/python benchmarks/plan_speed.py

clean: ## Remove the environment and everything built
	rm -rf $(VENV) build dist *.egg-info
