# Set-up happens once (again when requirements.lock or pyproject.toml change); every target needs it.
# The first Python in PATH that fits. Each is asked: a version manager has a stub for those that it lacks.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$python && break; done)
# Relative, because the shell that runs a line would read a space, a quote or a dollar in the folder's name.
BIN := .venv/bin
INSTALLED := .venv/.installed
INTEROP := .venv/.interop

# PATH has colons between folders, and the scripts of an environment hold its path as shell code in double quotes.
define UNFIT
$(findstring :,$(CURDIR))$(findstring $$,$(CURDIR))$(findstring ",$(CURDIR))$(findstring `,$(CURDIR))$(findstring \,$(CURDIR))
endef
ifneq ($(strip $(UNFIT)),)
$(error $(CURDIR): the path has one of : $$ " ` \, which PATH and the scripts of a virtual environment may read as something else; rename that folder, or move this one to another, and run make again)
endif

export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: setup repro test check faults interop browser flows ui

repro: $(INSTALLED)  ## bring every stage up to date
	$(BIN)/dvc repro

test: check  ## everything that must hold before a change lands, a process per core
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

check: $(INSTALLED)  ## layout, lint, types
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy

faults: $(INSTALLED)  ## kills, full disks, dead servers: half an hour
	$(BIN)/python -m pytest -m faults

interop: $(INTEROP)  ## the losses against trl, the adapters against peft
	$(BIN)/python -m pytest tests/test_oracles.py tests/test_lora.py

browser: $(INSTALLED)  ## the HTML pages in headless Chromium, installed from Debian where it is missing
	command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq chromium; }
	$(BIN)/python -m pytest -m browser

flows: $(INSTALLED)  ## Prefect server, worker and the deployments minimind/<stage>, until Ctrl-C
	$(BIN)/python -m flows.local

ui: $(INSTALLED)  ## curves and samples of all runs
	$(BIN)/python -m pipeline.tracking.ui

setup: $(INSTALLED)

$(INSTALLED): requirements.lock pyproject.toml
	test -x $(BIN)/python || test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 is needed, and none is in PATH" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	cp deploy/own_python.pth deploy/do_not_track.pth "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	test -d .dvc || $(BIN)/dvc init --quiet
	touch $@

# trl, peft and accelerate on top; requirements.lock as constraints keeps torch and all else as they are.
$(INTEROP): requirements-interop.lock $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-interop.lock
	touch $@
