# Everything a checkout needs, from a machine that has Python 3.11 or newer and make.
# `make` alone lists the targets.

PYTHON ?= python3
VENV ?= .venv
# Most tests wait for a server: more processes than cores pay off.
WORKERS ?= 4
# For example: make test ARGS='tests/unit -k identity'
ARGS ?=
# For example: make chaos OPERATIONS=300 SEED=7. Without a seed there is a new one; it is printed.
OPERATIONS ?= 10000
SEED ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# pyright brings its own JavaScript with it; without this it asks on every start whether there is a newer one.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.PHONY: help system install demo test chaos bench check format lock clean
.DELETE_ON_ERROR:

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

system: ## Install what the tests and the benchmarks need of Debian or Ubuntu (as root)
	apt-get update -q
	DEBIAN_FRONTEND=noninteractive apt-get install -yq --no-install-recommends postgresql redis-server spin gcc libc6-dev

install: $(STAMP) ## Create .venv with every pinned dependency and Redrive itself

# uv comes first, checked against the lock by pip; it then makes the environment exactly what the lock says.
$(STAMP): requirements.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo 'There is no $(PYTHON) here. Redrive needs Python 3.11 or newer; name it as in: make PYTHON=python3.13' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("Redrive needs Python 3.11 or newer, and $(PYTHON) is %d.%d. Try: make PYTHON=python3.13" % v[:2])'
	@$(PYTHON) -c 'import ensurepip, venv' || { echo 'This Python has no venv module. On Debian and Ubuntu: apt install python3-venv' >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	awk '/^[^ ]/ { uv = /^uv==/ } uv' requirements.lock > $(VENV)/uv.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r $(VENV)/uv.txt
	$(BIN)/uv pip sync --quiet --python $(BIN)/python --require-hashes requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@

demo: install ## Run the demo: an embedded Temporal server, a worker and tools that misbehave
	$(BIN)/redrive demo

test: install ## Run every test, or those of ARGS
ifeq ($(strip $(ARGS)),)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m 'not exhaustive'
	$(BIN)/python -m pytest -n 2 --dist worksteal -m exhaustive
else
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)
endif

chaos: install ## Kill, freeze and cut off every process under OPERATIONS random operations; SEED repeats one
	$(BIN)/python -m tests.chaos $(if $(SEED),--seed $(SEED)) --operations $(OPERATIONS) $(ARGS)

bench: install ## Measure Redrive beside bare Temporal and other engines: half an hour on a machine with nothing else to do
	@if command -v npm >/dev/null; then npm ci --prefix benchmarks --ignore-scripts --no-audit --no-fund; \
		else echo 'There is no npm here: Restate is left out.' >&2; fi
	$(BIN)/python -m benchmarks --write $(ARGS)

check: install ## Lint, formatting, types, and which package may import which
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-logo

format: install ## Rewrite the code in the house format, and fix what can be fixed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

lock: install ## Pin the newest allowed versions in requirements.lock
	$(BIN)/uv pip compile pyproject.toml --quiet --upgrade --universal --python-version 3.11 --all-extras --group dev \
		--generate-hashes --no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock' \
		--output-file requirements.lock

clean: ## Remove the environment, caches and what was built
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
