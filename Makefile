# make quickstart   a fresh clone to a measured drafter, on the CPU        make test   what CI runs
PYTHON ?= python3
VENV   ?= .venv
SERVING := .venv-serving
BIN    := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
export OMP_NUM_THREADS ?= 1
unexport PYTHONDONTWRITEBYTECODE  # modules are compiled on first import, not by each of the many processes

.PHONY: quickstart deploy up down install test test-slow test-serving test-gpu lint clean

quickstart: install
	$(BIN)/python -m flows.train --config configs/quickstart.yaml

PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt

install: $(VENV)/.installed

# The pins as they are (torch, which is as large as the rest, beside them), and last what this platform still lacks: three times
# faster than resolving. Where the index has a CPU build of that torch, it is taken. --no-compile: modules are compiled on import.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	sed '/^# development/,$$d; /^torch==/d' constraints.txt > $(VENV)/pins.txt
	$(PIP) --no-deps "$(shell grep '^torch==' constraints.txt)" & torch=$$!; \
	  $(PIP) --no-deps --requirement $(VENV)/pins.txt || { kill $$torch; exit 1; }; wait $$torch
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
	$(PYTEST) -m "not slow and not serving and not gpu" --numprocesses 2 --dist loadfile --timeout 600

test-slow: $(VENV)/.installed-dev
	$(PYTEST) -m slow --timeout 3600

test-serving: $(VENV)/.installed-dev $(SERVING)/.installed
	$(PYTEST) -m serving --timeout 1800 tests/serving

# vLLM and z-lab's package pin other versions than ours and name packages that they do not use: exactly the pins, nothing else.
$(SERVING)/.installed: constraints-serving.txt
	test -x $(SERVING)/bin/python || $(PYTHON) -m venv $(SERVING)
	$(SERVING)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps --requirement $<
	touch $@

test-gpu: $(VENV)/.installed-dev
	$(PYTEST) -m gpu

# On the server of PREFECT_API_URL: work pool, queues, automations, deployments. KIND: process, docker or kubernetes.
KIND ?= process
deploy: $(VENV)/.installed
	PREFECT=$(BIN)/prefect infra/deploy $(KIND)

# Prefect, MLflow, an S3 store and a worker as processes of this machine; .local/ keeps their data.
up: $(VENV)/.installed-dev
	BIN=$(BIN) infra/local up

down:
	BIN=$(BIN) infra/local down

clean:
	rm -rf $(VENV) $(SERVING) runs
