# Phalanx: everything is set up in .venv by the first target that needs it. Needs Python >= 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PORT ?= $(or $(PHALANX_PORT),8000)
MODEL ?= $(or $(PHALANX_MODEL),digits)
ifdef RANKS
export PHALANX_RANKS := $(RANKS)
endif

.PHONY: serve test test-long check bench setup clean

serve: setup ## front end and ranks, until Ctrl-C (PORT=8000 RANKS=2 MODEL=digits)
	@PHALANX_PORT=$(PORT) exec $(BIN)/phalanx serve $(MODEL)

test: $(VENV)/.test ## the tests, under 8 minutes on 2 cores
	$(BIN)/python -m pytest

test-long: $(VENV)/.test ## every test, the long ones included
	$(BIN)/python -m pytest -m "long or not long" --timeout 900
	$(BIN)/python -m tests.bench.chaos --seconds 600
	$(BIN)/python -m tests.bench.chaos --seconds 300 --groups 2 --ranks 1 --seed 2
	$(BIN)/python tests/containers/run

check: $(VENV)/.test ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup ## speed, as ratios within one run
	$(BIN)/python -m tests.bench.serving
	$(BIN)/python -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2 tests/bench/collect.py

setup: $(VENV)/.installed

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("Phalanx needs Python >= 3.11, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "python3 -m venv failed: install the venv module (Debian: python3-venv)" >&2; exit 1; }

# pip, not uv: pip finds a CPU build of torch where one is offered
$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	@echo "Installing Phalanx and PyTorch into $(VENV): once, a few minutes ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.test: $(VENV)/.installed
	@echo "Installing what the tests need ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test,check,train]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
