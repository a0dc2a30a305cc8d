# firstlight: everything starts here. `make help` lists the targets.
#
# One environment, .venv, in two sizes: `make serve` installs what serving needs (build tools live in a throw-away
# environment of pip's), `make test` adds the tools of a developer. Both install the package in editable mode, so an edit to
# a Python file needs no target; an edit to pyproject.toml, CMakeLists.txt or csrc/ rebuilds.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?= smollm2-135m
ARGS ?=
PYTEST_ARGS ?=
# A Python 3.11 or later to build .venv from; empty means: look for one on PATH.
PYTHON ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
BUILD_INPUTS := pyproject.toml CMakeLists.txt csrc $(wildcard csrc/*)
CSRC := $(wildcard csrc/*.cpp csrc/*.h csrc/*.hpp)
RUNTIME := .venv/.runtime
DEV := .venv/.dev
# Once the developer's environment exists it serves too; the smaller one is not installed over it.
INSTALLED := $(if $(wildcard $(DEV)),$(DEV),$(RUNTIME))

.PHONY: help serve pull test sanitize lint format types bench oracle docs clean distclean

help: ## this list
	@echo "firstlight: make TARGET [NAME=value ...]"
	@sed -nE 's/^([a-z]+):[^#]*## (.*)/  make \1\t\2/p' Makefile | expand -t 18

serve: $(INSTALLED) ## install, fetch the model and serve it (HOST=127.0.0.1 PORT=8000 MODEL=smollm2-135m ARGS="--threads 2")
	@exec $(BIN)/firstlight serve "$(MODEL)" --host "$(HOST)" --port "$(PORT)" $(ARGS)

pull: $(INSTALLED) ## fetch the model (MODEL=smollm2-135m)
	@$(BIN)/firstlight pull "$(MODEL)"

test: lint types ## lint, types, and every test this machine can run (PYTEST_ARGS="-k exact")
	@$(BIN)/firstlight pull smollm2-135m
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

# The sanitizers' library must come first in the process, and with it the one it intercepts exceptions of. Python's own
# allocations are never freed at exit, so leaks are not looked for.
sanitize: $(DEV) ## the kernels' tests over a build with address and undefined-behaviour sanitizers
	@$(BIN)/cmake -S . -B build/sanitize -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DFIRSTLIGHT_SANITIZE=ON \
	  -DCMAKE_MAKE_PROGRAM="$(abspath $(BIN))/ninja" -DPython_EXECUTABLE="$(abspath $(BIN))/python" > build/sanitize.log
	@$(BIN)/cmake --build build/sanitize
	@LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	  FIRSTLIGHT_NATIVE="$$(echo build/sanitize/_native.*.so)" \
	  $(BIN)/python -m pytest -p tests.kernel.native_build tests/kernel $(PYTEST_ARGS)

lint: $(DEV) ## ruff and clang-format, changing nothing
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run -Werror $(CSRC)

types: $(DEV) ## mypy, strict
	@$(BIN)/mypy

format: $(DEV) ## rewrite the sources as lint wants them
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CSRC)

bench: $(INSTALLED) ## a short load against a server of its own (ARGS="--json result.json")
	@$(BIN)/firstlight bench --model "$(MODEL)" $(ARGS)

oracle: $(DEV) ## add torch, which some tests use as a second opinion and skip without
	@$(PIP) install --quiet -e '.[oracle]' --no-build-isolation

docs: $(INSTALLED) ## write docs/options.md from the options themselves
	@$(BIN)/python -m firstlight.cli.options_page > docs/options.md

clean: ## remove what was built, keep the environment
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .venv/.runtime .venv/.dev
	find firstlight tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## remove the environment as well
	rm -rf .venv

# The interpreter must be new enough and able to make environments and build extensions; say which part is missing.
.venv/.created:
	@for candidate in $(PYTHON) python3.11 python3.12 python3.13 python3.14 python3; do \
	  command -v "$$candidate" >/dev/null || continue; \
	  "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	  "$$candidate" -c 'import ensurepip, venv' 2>/dev/null || { needs="python3-venv"; continue; }; \
	  "$$candidate" -c 'import os, sysconfig as s; os.stat(s.get_paths()["include"] + "/Python.h")' 2>/dev/null \
	    || { needs="python3-dev (Python.h)"; continue; }; \
	  found="$$candidate"; break; \
	done; \
	if [ -z "$${found:-}" ]; then \
	  echo "error: no Python 3.11 or later that can build extensions is on PATH$${needs:+: one lacks $$needs}" >&2; \
	  echo "hint: install Python 3.11 with its headers and venv, or name one: make PYTHON=/path/to/python3.11 serve" >&2; \
	  exit 2; \
	fi; \
	echo "environment: .venv from $$("$$found" -V) ($$(command -v "$$found"))"; \
	"$$found" -m venv .venv; touch $@

$(RUNTIME): $(BUILD_INPUTS) | .venv/.created
	@echo "install: dependencies and native kernels (a few minutes the first time)"
	@$(PIP) install --quiet -e .
	@touch $@

$(DEV): $(BUILD_INPUTS) | .venv/.created
	@echo "install: development tools and native kernels (a few minutes the first time)"
	@$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["dev"], sep="\n")' \
	  > .venv/dev-requirements.txt
	@$(PIP) install --quiet -r .venv/dev-requirements.txt
	@$(PIP) install --quiet --no-build-isolation -e .
	@touch $@ $(RUNTIME)
