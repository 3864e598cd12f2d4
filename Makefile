# make quickstart   a fresh clone to a measured drafter, on the CPU        make test   what CI runs
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
export OMP_NUM_THREADS ?= 1

.PHONY: quickstart install test test-slow test-serving test-gpu lint clean

quickstart: install
	$(BIN)/python -m flows.train --config configs/quickstart.yaml

install: $(VENV)/.installed

# --no-compile: a third faster; modules are compiled when they are first imported
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check "$(shell grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: install lint
	$(PYTEST) -m "not slow and not serving and not gpu"

test-slow: install
	$(PYTEST) -m slow

test-serving: install
	$(PYTEST) -m serving

test-gpu: install
	$(PYTEST) -m gpu

clean:
	rm -rf $(VENV) runs
