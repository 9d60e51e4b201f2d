# SPDX-License-Identifier: Apache-2.0
# `make` lists the targets. Everything runs from the repository's own virtual environment in .venv.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
PY := $(VENV)/bin/python
UV := $(PY) -m uv
UV_VERSION := 0.13.9
STAMP := $(VENV)/.installed
PYTEST := $(PY) -m pytest
# Folders of tests that need a machine, a cluster or an engine of their own; each has its own target.
APART := --ignore=tests/engine --ignore=tests/gpu --ignore=tests/cluster --ignore=tests/chart --ignore=tests/e2e --ignore=tests/portable
STORIES ?= tests/e2e
OPS ?= 20000
SEED ?=
# Operations of real processes, some tens a second.
FAULT_OPS ?= 1000
# Simulated nodes of the largest test of test-cluster; SCALE=100 is a quick look.
SCALE ?= 1000
# Version of vLLM for test-engine; empty is the one that tools/vllm_env.py takes by itself.
VLLM ?=
# Downloads and builds that outlive this folder.
export KVPOOL_CACHE ?= $(HOME)/.cache/kvpool
export UV_CACHE_DIR ?= $(KVPOOL_CACHE)/uv
RESULT ?= build/bench.json

.PHONY: help setup lock demo test check lint types imports generate golden freeze changes-check \
	test-fast test-engine test-cluster test-portable e2e test-gpu torture bench bench-operator bench-webhook format clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(STAMP) ## install everything into .venv (fast when up to date)

$(STAMP): pyproject.toml requirements-dev.lock Makefile
	test -x $(PY) || python3 -m venv $(VENV)
	$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvpool needs Python 3.11 or newer")'
	$(UV) --version 2>/dev/null | grep -q ' $(UV_VERSION)' || $(PY) -m pip install --quiet uv==$(UV_VERSION)
	$(UV) pip install --quiet --python $(PY) -r requirements-dev.lock
	$(UV) pip install --quiet --python $(PY) --no-deps -e .
	touch $@

lock: ## pin the versions of all packages again
	$(UV) pip compile pyproject.toml --extra dev --python-version 3.11 --quiet --no-header --no-emit-index-url \
		-o requirements-dev.lock >/dev/null
	sed -i '1i # Pinned by `make lock` from pyproject.toml. Do not edit.' requirements-dev.lock

demo: setup ## a shared prefix with a real engine on CPU, then the operator on a control plane
	$(PY) -m tools.demo

test: check test-fast test-engine test-cluster e2e torture ## all that needs no GPU

check: lint types imports changes-check generated ## style, types, arrows, derived files

lint: setup
	$(PY) -m ruff check
	$(PY) -m ruff format --check

types: setup
	$(PY) -m mypy
	$(PY) -m mypy --config-file tests/mypy.ini

imports: setup
	$(VENV)/bin/lint-imports .importlinter --no-cache --no-logo
	$(VENV)/bin/lint-imports .importlinter-operator --no-cache --no-logo

.PHONY: generated
generated: setup
	$(PY) -m tools.generate --check

changes-check: setup
	$(PY) -m towncrier build --draft --version 0 >/dev/null

generate: setup ## write every derived file
	$(PY) -m tools.generate

golden: setup ## write the reviewed shape of the protocol and its recorded frames again
	$(PY) -c 'from tests.architecture.test_protocol import GOLDEN, described; GOLDEN.write_bytes(described())'
	$(PY) -m tests.golden.test_frames

freeze: setup ## keep the committed state as the release that the next one must get along with
	$(PY) -m tools.freeze

test-fast: setup ## unit, property, contract, integration and architecture tests
	$(PYTEST) tests $(APART) -q

test-engine: setup ## tests with a real vLLM on CPU (its environment is installed once, outside this folder); VLLM=0.31.0
	KVPOOL_TEST_VLLM=$(VLLM) $(PY) tools/vllm_env.py
	KVPOOL_TEST_VLLM=$(VLLM) $(PYTEST) tests/engine -q

test-cluster: setup ## the operator and its chart on a real control plane (built once, outside this folder)
	$(PY) tools/cluster_assets.py --only control-plane
	KVPOOL_EXPECT_CLUSTER=1 KVPOOL_SCALE_NODES=$(SCALE) $(PYTEST) tests/cluster tests/chart tests/portable -q

e2e: setup ## the whole story with real pods on two real nodes (needs root, namespaces, buildah; says what is missing)
	@status=0; reason=$$($(PY) -m tests.e2e.local) || status=$$?; \
	case "$$status$(KVPOOL_EXPECT_NODES)" in \
	0*) KVPOOL_EXPECT_NODES=1 $(PYTEST) $(STORIES) -q ;; \
	3) echo "e2e: skipped: $$reason" ;; \
	*) echo "e2e: failed: $$reason"; exit 1 ;; \
	esac

bench-operator: setup ## measure the operator with 1,000 simulated nodes and judge it by benchmarks/bars.toml
	$(PY) -m benchmarks.operator_scale --json build/operator.json
	$(PY) benchmarks/judge.py build/operator.json

test-portable: setup ## a pool's life on any cluster: E2E_PROVIDER=process|local|kind|existing, see tests/portable/providers.py
	$(PYTEST) tests/portable -q -rs

bench-webhook: setup ## measure the admission server at 50 pods a second and judge it by benchmarks/bars.toml
	$(PY) -m benchmarks.webhook --json build/webhook.json
	$(PY) benchmarks/judge.py build/webhook.json

test-gpu: setup ## tests on a CUDA device; skipped without one
	@if nvidia-smi -L >/dev/null 2>&1; then $(PYTEST) tests/gpu -q; else echo "test-gpu: no CUDA device, skipped"; fi

torture: setup ## random operations with deaths, stalls and crashes, every byte checked; OPS=1000000 FAULT_OPS=20000 SEED=7
	$(PY) -m tests.property.index_machine --ops $(OPS) $(if $(SEED),--seed $(SEED))
	$(PY) -m tests.property.fault_campaign --ops $(FAULT_OPS) $(if $(SEED),--seed $(SEED))

bench: setup ## measure the control plane and judge it by benchmarks/bars.toml
	mkdir -p $(dir $(RESULT))
	$(VENV)/bin/kvpool bench control --json $(RESULT)
	$(PY) benchmarks/judge.py $(RESULT)

format: setup ## let ruff rewrite what it can
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

clean: ## remove everything that make made, .venv too
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
