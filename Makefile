# Set-up happens once (again when requirements.lock or pyproject.toml change); every target needs it.
PYTHON ?= python3.11
BIN := $(CURDIR)/.venv/bin
INSTALLED := .venv/.installed

export PATH := $(BIN):$(PATH)

.PHONY: setup repro test check ui

repro: $(INSTALLED)  ## bring every stage up to date
	$(BIN)/dvc repro

test: check  ## everything that must hold before a change lands
	$(BIN)/python -m pytest

check: $(INSTALLED)  ## layout, lint, types
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy

ui: $(INSTALLED)  ## curves and samples of all runs
	$(BIN)/python -m pipeline.tracking.ui

setup: $(INSTALLED)

$(INSTALLED): requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	test -d .dvc || $(BIN)/dvc init --quiet
	touch $@
