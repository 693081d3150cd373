# Two commands matter: `make serve` and `make test`. Both install what they need into .venv first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
LOCK   := builder/requirements.lock
TODAY  := $(shell date +%F)
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(LOCK)

.PHONY: serve test test-unit test-clients lint bench clean help

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

serve: $(VENV)/.installed  ## gateway + worker + engine on this machine; the demo model unless MODEL_NAME is set
	@exec $(BIN)/python -u -m gateway.supervisor

test: $(VENV)/.installed-dev  ## everything that .ci/run decides by
	$(BIN)/python -m pytest -q

test-unit: $(VENV)/.installed-dev  ## the part without a model: seconds
	$(BIN)/python -m pytest -q tests/unit

test-clients: $(VENV)/.installed-dev  ## real clients, each in its own environment, against a served project
	$(BIN)/python -m pytest -q tests/clients/all_clients.py

lint: $(VENV)/.installed-dev  ## ruff and mypy
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/.installed-bench  ## this project and others side by side on this machine: an hour, a quiet machine
	$(BIN)/python -m benchmarks.peers
	$(BIN)/python -m benchmarks.side_by_side --name $(TODAY)
	$(BIN)/python -m benchmarks.side_by_side --name $(TODAY)-quantized --workloads "1 stream" "8 streams" \
		--peers "worker-paged int8" "worker-paged int4" "llama-server f16" "llama-server q8_0" "llama-server q4_1"
	$(BIN)/python -m benchmarks.offline_peers --name $(TODAY)-offline
	$(BIN)/python -m benchmarks.first_token --json benchmarks/results/$(TODAY)-first-token.json
	$(BIN)/python -m benchmarks.profile --batch 1 8 --context 192 1024 4096 8000 \
		--json benchmarks/results/$(TODAY)-profile.json
	$(BIN)/python -m benchmarks.bookkeeping --json benchmarks/results/$(TODAY)-bookkeeping.json
	$(BIN)/python -m benchmarks.plots benchmarks/results/$(TODAY)

$(VENV)/bin/python:
	@echo "creating $(VENV) ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=")'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml $(LOCK)
	@echo "installing the worker (a few minutes the first time: torch is large) ..."
	@$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing the test tools ..."
	@$(PIP) --editable '.[dev]'
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed
	@echo "installing what draws the plots ..."
	@$(PIP) --editable '.[bench]'
	@touch $@

clean:  ## remove the environment and caches of this folder
	rm -rf $(VENV) .venv-* tests/clients/node/node_modules .pytest_cache .mypy_cache .ruff_cache *.egg-info
