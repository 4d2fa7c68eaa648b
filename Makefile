# Two commands do all set-up: `make demo` and `make test`. Each makes its own virtual environment.
PYTHON ?= python3
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint cover clean test-triton-versions

demo: $(VENV)/.demo
	$(BIN)/foldmoe demo

test: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check src tests && $(BIN)/mypy

cover: $(VENV)/.dev
	$(BIN)/python -m pytest --cov --cov-report=term-missing $(PYTEST_ARGS)

$(VENV)/.base: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q "$(TORCH)"
	touch $@

$(VENV)/.demo: $(VENV)/.base
	$(BIN)/python -m pip install -q -e ".[transformers]"
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(BIN)/python -m pip install -q "$(TRITON)" -e ".[transformers,hub,gpu,report,dev]"
	touch $@ $(VENV)/.demo

# Ahead-of-time compiles for sm_90 over every Triton that is supported, each in an environment of its own.
TRITON_VERSIONS ?= 3.6.0 3.7.1 3.8.0 3.9.0
test-triton-versions: $(VENV)/.dev
	for version in $(TRITON_VERSIONS); do \
	  folder=$(VENV)-triton-$$version; \
	  $(BIN)/python -m pip install -q --no-deps --upgrade --target $$folder triton==$$version || exit 1; \
	  $(BIN)/python tests/triton/compile_versions.py $$folder || exit 1; \
	done

clean:
	rm -rf $(VENV) $(VENV)-* build dist .pytest_cache .mypy_cache .ruff_cache
