# `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := $(CURDIR)/.venv/bin
FLOOR := $(CURDIR)/.venv-2.16/bin
IN_VENV := PATH="$(VENV):$$PATH"
MOLECULE := molecule test --scenario-name
# The tests of modules spend most of their time in waiting for simulated engines.
SIDE_BY_SIDE := --numprocesses=4 --dist=worksteal
SHELL_SCRIPTS = $(shell git ls-files --cached --others --exclude-standard | xargs -r awk 'FNR == 1 { if (/^[#]!(\/usr)?\/bin\/(env )?(ba)?sh/) print FILENAME; nextfile }')

.PHONY: help deps lint sanity docs unit sim-conformance integration rolling molecule chaos gpu test test-all demo lock clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

deps: ## Debian packages and three virtual environments; nothing to do takes a second
	@$(PYTHON) tools/deps.py

lint: deps ## yamllint, ansible-lint, ruff, mypy, shellcheck, changelog, plugin documentation, galaxy-importer
	@mkdir -p build  # antsibull-docs logs to its home
	@export PATH="$(VENV):$$PATH" failed=""; \
	step() { echo "== $$*"; "$$@" || failed+=" ($$*)"; }; \
	step yamllint --strict .; \
	step ansible-lint --offline --nocolor -q; \
	step ruff check --quiet --output-format concise; \
	step ruff format --check --output-format concise; \
	step mypy; \
	step shellcheck $(SHELL_SCRIPTS); \
	step antsibull-changelog lint; \
	step env HOME="$(CURDIR)/build" antsibull-docs lint-collection-docs --plugin-docs .; \
	step python tools/galaxy.py; \
	[ -z "$$failed" ] || { echo "lint: failed:$$failed" >&2; exit 1; }

sanity: deps ## ansible-test sanity with three versions of ansible-core, ansible-test units with two
	@echo "== ansible-test sanity"; $(VENV)/python tools/ansible_test.py sanity
	@echo "== ansible-test units"; $(VENV)/python tools/ansible_test.py units

docs: deps ## the site of the documentation, in build/docs/html; a warning is a failure
	@echo "== docs"; $(VENV)/python tools/docs.py

unit: deps ## unit tests, current and 2.16
	@echo "== unit tests, .venv"; $(VENV)/python -m pytest $(SIDE_BY_SIDE) -r fER tests/unit
	@echo "== unit tests of what Ansible loads, .venv-2.16 (ansible-test units has run those of plugins)"; $(FLOOR)/python -m pytest $(SIDE_BY_SIDE) -r fER tests/unit/roles tests/unit/test_collection.py tests/unit/lifecycle/test_four_runs.py

sim-conformance: deps ## replay what real engines answered against the simulator
	@echo "== sim-conformance"; $(VENV)/python tests/sim/conformance.py

integration: deps ## tests against real parts
	@echo "== integration tests"; $(IN_VENV) python -m pytest tests/integration

rolling: deps ## a fleet is rolled on the lab while things fail
	@echo "== rolling"; $(IN_VENV) $(MOLECULE) rolling

molecule: rolling ## that and the other scenarios: engines take turns, hosts serve one replica, a fleet is upgraded
	@for one in switching groups upgrading; do echo "== $$one"; $(IN_VENV) $(MOLECULE) $$one; done

chaos: deps ## every fault at every step of a roll, on the lab; about an hour
	@echo "== chaos"; $(IN_VENV) CHAOS=all VLLM_LAB_TESTS=tests/chaos $(MOLECULE) rolling

gpu: deps ## the whole life of engines on this machine's own GPU; says so where there is none
	@echo "== gpu"; $(IN_VENV) $(MOLECULE) gpu

test: export PYTEST_ADDOPTS := -m "not long"
test: lint sanity docs unit sim-conformance rolling ## what every change has to pass, half an hour: no test that is marked long
	@echo "make test: lint, sanity, docs, unit, sim-conformance and rolling passed"

test-all: export GALAXY_IMPORTER_RUN_ANSIBLE_LINT := True
test-all: lint sanity docs unit sim-conformance integration molecule ## what a release has to pass, about two hours
	@echo "make test-all: lint, sanity, docs, unit, sim-conformance, integration and molecule passed"

demo: deps ## roll a fleet of three engines under load, ours against naive
	@$(IN_VENV) python tests/demo.py

lock: ## pin requirements/*.in anew (wants uv)
	uv pip compile --quiet --upgrade --universal --python-version 3.11 --no-annotate --no-header requirements/dev.in -o requirements/dev.txt
	uv pip compile --quiet --upgrade --universal --python-version 3.11 --no-annotate --no-header requirements/previous.in -o requirements/previous.txt
	uv pip compile --quiet --upgrade --universal --python-version 3.10 --no-annotate --no-header requirements/floor.in -o requirements/floor.txt
	uv pip compile --quiet --upgrade --universal --python-version 3.12 --no-annotate --no-header requirements/ee.in -o requirements/ee.txt

clean: ## remove build/, caches and the venvs
	rm -rf build .venv .venv-previous .venv-2.16 .ansible .mypy_cache .pytest_cache .ruff_cache .hypothesis
