# Set-up happens once (again when requirements.lock or pyproject.toml change); every target needs it.
PYTHON ?= python3.11
BIN := $(CURDIR)/.venv/bin
INSTALLED := .venv/.installed
INTEROP := .venv/.interop

export PATH := $(BIN):$(PATH)

.PHONY: setup repro test check faults interop browser flows ui

repro: $(INSTALLED)  ## bring every stage up to date
	$(BIN)/dvc repro

test: check  ## everything that must hold before a change lands, a process per core
	$(BIN)/python -m pytest -n auto --dist loadfile

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
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	test -d .dvc || $(BIN)/dvc init --quiet
	touch $@

# trl, peft and accelerate on top; requirements.lock as constraints keeps torch and all else as they are.
$(INTEROP): requirements-interop.lock $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-interop.lock
	touch $@
