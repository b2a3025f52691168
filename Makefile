# ShaleKV: everything a developer types. `make help` lists it.
#
# Nothing has to be prepared: each target builds what it needs. What is built leaves a file behind
# (.venv/*.stamp, .cache/*.stamp, protos/node_modules/.stamp), and is built again when its lock file
# or a pyproject.toml is newer than that file.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

# A name on the path may be a shim that runs nothing, so the choice is made by running it.
PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
# The tests start processes by the thousand, and each would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
GENERATED := clients/python/shalekv/v1
BUF := protos/node_modules/.bin/buf
GRPCURL_VERSION := v1.9.4

# Passed on to the command: `make run ARGS="--log-format json"`, `make test ARGS="-k fence"`.
ARGS ?=

.PHONY: help
help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) \
	  | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

## Using it

.PHONY: run
run: .venv/run.stamp ## Serve a database in ./data on 127.0.0.1:7654 (more flags: ARGS="...")
	@exec $(BIN)/shalekv serve --create --url "file://$(CURDIR)/data" $(ARGS)

## Proving it

# Budgets on 2 cores, with everything installed: quick 2 minutes, test 15 (20 on a fresh machine),
# sim 15; soak takes hours. Tests of one file stay together, in their order. They wait a third of
# their time, so there is a process more than there are cores.
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest
SIDE_BY_SIDE = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
TOOLS := .cache/grpcurl-$(GRPCURL_VERSION).stamp servers

.PHONY: quick
quick: .venv/dev.stamp ## Lint, types, layers and unit tests: 2 minutes
	@$(MAKE) --jobs=2 check-code check-types check-layers
	@$(PYTEST) $(SIDE_BY_SIDE) --durations=5 tests/style tests/unit $(ARGS)

# The simulation fills all cores by itself, so it has them alone; everything else shares them. With
# ARGS (`make test ARGS="-k fence"`) all tests are one run. `check` has run tests/style. (--ignore
# would not leave out what pytest's `testpaths` name.) What takes minutes on a fresh machine is
# checked and fetched side by side.
.PHONY: test
test: java ## All that a change must pass: 15 minutes (failed tests again: ARGS=--lf)
	@$(MAKE) --jobs=2 check $(TOOLS)
ifeq ($(ARGS),)
	@status=0; $(PYTEST) tests/sim || status=$$?; \
	  $(PYTEST) $(SIDE_BY_SIDE) --deselect=tests/sim --deselect=tests/style || status=$$?; exit $$status
else
	@$(PYTEST) $(SIDE_BY_SIDE) $(ARGS)
endif

.PHONY: coverage
coverage: java .venv/dev.stamp $(TOOLS) ## The same tests, and which lines they run
	@$(PYTEST) $(SIDE_BY_SIDE) --cov $(ARGS)

.PHONY: soak
soak: java .venv/dev.stamp $(TOOLS) ## The long tests, then `sim`: hours
	@$(BIN)/python -m tests.servers.obtain minio interop-go interop-java interop-js
	@$(PYTEST) -m soak $(ARGS)
	@$(MAKE) sim ARGS=

# More to choose: `.venv/bin/python -m tests.sim campaign --help`.
.PHONY: sim
sim: .venv/dev.stamp ## Simulate 2,000 fixed seeds and plant every mutant: 15 minutes
	@$(BIN)/python -m tests.sim campaign $(ARGS)
	@$(BIN)/python -m tests.sim mutants

.PHONY: sim-long
sim-long: .venv/dev.stamp ## Simulate 10,000 seeds that no other target runs: hours (ARGS="--hours 8")
	@$(BIN)/python -m tests.sim campaign --first 100000 --seeds 10000 $(ARGS)

# More to choose: `.venv/bin/python -m tests.bench --help`.
.PHONY: bench
bench: .venv/dev.stamp servers ## Measure beside etcd, Redis and SlateDB: 10 minutes (ARGS="--write": BENCHMARKS.md)
	@$(BIN)/python -m tests.bench run $(ARGS)

.PHONY: bench-memory
bench-memory: .venv/dev.stamp servers ## Full load for 30 minutes: is memory flat? (ARGS="--minutes 2")
	@$(BIN)/python -m tests.bench memory $(ARGS)

# Spark looks for Java where this does. Asked first: what comes before the tests takes minutes.
.PHONY: java
java:
	@java="$${JAVA_HOME:+$$JAVA_HOME/bin/}java"; \
	  version=$$("$$java" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p' || true); \
	  test "$${version:-0}" -ge 17 || { \
	  echo "The tests of the Spark pipeline need Java 17 or newer (a JRE without a screen will do)," >&2; \
	  echo "and $$java is version $${version:-unknown, or not there}." >&2; \
	  echo "Install it, or name another one: JAVA_HOME=/path/to/java make ..." >&2; exit 1; }

.PHONY: servers
servers: .venv/dev.stamp
	@$(BIN)/python -m tests.servers.obtain

.PHONY: check
check: check-code check-types check-layers check-protos check-style ## Lint, types, layers, protos, house rules (make -k check: don't stop early)

.PHONY: check-code
check-code: .venv/dev.stamp
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet || { echo "Run \`make format\`." >&2; exit 1; }

.PHONY: check-types
check-types: .venv/dev.stamp
	@$(BIN)/mypy

.PHONY: check-layers
check-layers: .venv/dev.stamp
	@$(BIN)/lint-imports --no-logo --no-cache

# The house rules, and that the documents name what exists.
.PHONY: check-style
check-style: .venv/dev.stamp
	@$(PYTEST) -q --durations=0 --durations-min=10 tests/style

.PHONY: format
format: .venv/dev.stamp ## Format the code, and mend what ruff can mend
	@$(BIN)/ruff check --fix --quiet || true
	@$(BIN)/ruff format

## Protos

# $(call generate,FOLDER): the Python code of the protos. The gRPC plugins run only on files with a
# service; the others would come out empty.
define generate
$(BIN)/python -m grpc_tools.protoc -I protos \
  --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
  --python_out=$(1) --mypy_out=quiet:$(1) protos/shalekv/v1/*.proto
$(BIN)/python -m grpc_tools.protoc -I protos \
  --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
  --grpc_python_out=$(1) --mypy_grpc_out=quiet,only_async:$(1) \
  $$(grep -l '^service ' protos/shalekv/v1/*.proto)
endef

.PHONY: protos
protos: .venv/dev.stamp ## Generate clients/python/shalekv/v1 from protos/
	@rm -f $(GENERATED)/*_pb2*
	@$(call generate,clients/python)

.PHONY: protos-baseline
protos-baseline: protos/node_modules/.stamp ## Accept the protos as they are: later ones must be compatible
	@$(BUF) build protos --exclude-source-info -o protos/baseline.binpb

.PHONY: check-protos
check-protos: .venv/dev.stamp protos/node_modules/.stamp
	@$(BUF) lint protos
	@test -f protos/baseline.binpb || { \
	  echo "protos/baseline.binpb is missing: there is nothing to compare the protos with." >&2; \
	  echo "It belongs to the repository; \`make protos-baseline\` writes it." >&2; exit 1; }
	@$(BUF) breaking protos --against protos/baseline.binpb
	@rm -rf .cache/generated && mkdir -p .cache/generated
	@$(call generate,.cache/generated)
	@diff -rq -x __pycache__ -x __init__.py -x py.typed .cache/generated/shalekv/v1 $(GENERATED) || { \
	  echo "$(GENERATED) is not what the protos generate: run \`make protos\`." >&2; exit 1; }

## Environment

.PHONY: lock
lock: $(BIN)/uv ## Pin the dependencies again, after a change (ARGS=--upgrade: to the newest)
	@$(call compile,run) pyproject.toml --extra server --group build
	@$(call compile,stores) pyproject.toml --extra server $(STORES) --group build -c requirements/run.lock
	@$(call compile,dev) pyproject.toml --extra server $(STORES) --extra spark --group dev -c requirements/stores.lock
	@cd protos && npm install --package-lock-only --omit-lockfile-registry-resolved \
	  --no-audit --no-fund --loglevel=error >/dev/null

STORES := --extra gcs --extra azure --extra sqlite --extra mysql --extra postgres --extra etcd --extra otel --extra profile

# One lock serves all platforms and Pythons; every file has its hashes.
compile = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
  --no-emit-package shalekv-client \
  --custom-compile-command "make lock" -o requirements/$(1).lock $(ARGS)

.PHONY: clean
clean: ## Remove what the targets above have built (never ./data)
	rm -rf .venv .cache .hypothesis protos/node_modules dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "ShaleKV needs Python 3.11 or newer, and $(PYTHON) is not: $$($(PYTHON) --version 2>&1)" >&2; \
	  echo "Install it, or name another one: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@echo "creating .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv

# The locks hold all dependencies and the build backend, so that nothing is fetched without a hash
# and the install of this repository resolves nothing.
PROJECTS := pyproject.toml clients/python/pyproject.toml
EDITABLE := --editable clients/python --editable .

.venv/run.stamp: requirements/run.lock $(PROJECTS) | .venv/pyvenv.cfg
	@echo "installing requirements/run.lock"
	@$(PIP) install --no-deps --require-hashes -r requirements/run.lock
	@$(PIP) install --no-deps --no-build-isolation $(EDITABLE)
	@touch $@

# dev.lock has all that run.lock has, in the same versions: after this, `make run` adds nothing.
.venv/dev.stamp: requirements/dev.lock requirements/run.lock $(PROJECTS) | .venv/pyvenv.cfg
	@echo "installing requirements/dev.lock"
	@$(PIP) install --no-deps --require-hashes -r requirements/dev.lock
	@$(PIP) install --no-deps --no-build-isolation $(EDITABLE)
	@touch .venv/run.stamp $@

# For `lock` alone: it must not need the locks to agree with pyproject.toml.
$(BIN)/uv: | .venv/pyvenv.cfg
	@$(PIP) install --no-deps --require-hashes -r requirements/dev.lock

protos/node_modules/.stamp: protos/package.json protos/package-lock.json
	@command -v npm >/dev/null || { \
	  echo "The check of the protos needs npm (Node 18 or newer)." >&2; exit 1; }
	@echo "installing protos/package-lock.json"
	@cd protos && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error >/dev/null
	@touch $@

.cache/grpcurl-$(GRPCURL_VERSION).stamp:
	@command -v go >/dev/null || { \
	  echo "The end-to-end tests need Go, to build grpcurl $(GRPCURL_VERSION)." >&2; exit 1; }
	@echo "building grpcurl $(GRPCURL_VERSION)"
	@GOBIN="$(CURDIR)/.cache/bin" go install \
	  github.com/fullstorydev/grpcurl/cmd/grpcurl@$(GRPCURL_VERSION)
	@touch $@
