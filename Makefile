# make quickstart   a fresh clone to a measured drafter, on the CPU        make test   what CI runs
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
export OMP_NUM_THREADS ?= 1

.PHONY: quickstart install test test-slow test-serving test-gpu lint clean

quickstart: install
	$(BIN)/python -m flows.train --config configs/quickstart.yaml

PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt

install: $(VENV)/.installed

# torch first and pinned: where the index has a CPU build of that version, it is taken and satisfies the rest. Then the pins as
# they are, and last what this Python still lacks: a fifth faster than resolving. --no-compile: modules are compiled on import.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "$(shell grep '^torch==' constraints.txt)"
	sed '/^# development/,$$d' constraints.txt > $(VENV)/pins.txt
	$(PIP) --no-deps --requirement $(VENV)/pins.txt
	$(PIP) --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable ".[dev]"
	touch $@

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(PYTEST) -m "not slow and not serving and not gpu"

test-slow: $(VENV)/.installed-dev
	$(PYTEST) -m slow

test-serving: $(VENV)/.installed-dev
	$(PYTEST) -m serving

test-gpu: $(VENV)/.installed-dev
	$(PYTEST) -m gpu

clean:
	rm -rf $(VENV) runs
