# The one place where torch is pinned. Another version: make test TORCH=2.14.1
PINNED_TORCH := 2.13.0
TORCH ?= $(PINNED_TORCH)
PYTHON ?= python3
JOBS ?= 2
PROGRAMS ?= 2000
SEED ?= 0

# Each torch has its own environment; a changed Python, pyproject.toml or Makefile installs it anew.
VENV := .venv$(if $(filter-out $(PINNED_TORCH),$(TORCH)),-$(TORCH))
BIN := $(VENV)/bin
TAG := $(shell $(PYTHON) -c 'import sys; print("py%d.%d" % sys.version_info[:2])' 2>/dev/null)
READY := $(VENV)/.ready-torch$(TORCH)-$(TAG)

.PHONY: demo test conformance thunder-suite models lint fuzz clean
.DELETE_ON_ERROR:

demo: $(READY)
	$(BIN)/jointtrace demo

test: $(READY)
	$(BIN)/python -m pytest -n $(JOBS)

# Every operator through both front ends; what was judged of this source before is not judged again.
conformance: $(READY)
	PYTHONPATH=.:tests $(BIN)/python -W ignore -m conformance.ops --workers $(JOBS)

# thunder's own tests, without and with jointtrace's option; what ran before is not run again.
SUITE := .venv-thunder-suite

thunder-suite: $(SUITE)/.ready-torch$(PINNED_TORCH)-$(TAG)
	rm -rf build $(SUITE)/wheel
	$(SUITE)/bin/python -m pip wheel --no-deps --wheel-dir $(SUITE)/wheel .
	$(SUITE)/bin/python -m pip uninstall --yes jointtrace
	$(SUITE)/bin/python -m pip install "torch==$(PINNED_TORCH)" \
	  -r tests/conformance/thunder_suite/requirements.txt $(SUITE)/wheel/*.whl
	$(SUITE)/bin/python tests/conformance/thunder_suite/run.py $(SUITE)/results --jobs $(JOBS)

$(SUITE)/.ready-torch$(PINNED_TORCH)-$(TAG): tests/conformance/thunder_suite/requirements.txt
	$(PYTHON) -m venv --clear $(SUITE)
	$(SUITE)/bin/python -m pip install --upgrade "pip>=23"
	$(SUITE)/bin/python -m pip install "torch==$(PINNED_TORCH)" -r $<
	@touch $@

fuzz: $(READY)
	$(BIN)/python tests/conformance/fuzz/run.py --programs $(PROGRAMS) --seed $(SEED) --jobs $(JOBS)

# Sixteen models of transformers, trained through both front ends; writes the table under "Models".
models: $(READY)
	PYTHONPATH=.:tests $(BIN)/python -W ignore -m conformance.models.run

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .conformance

$(READY): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' || { \
	  echo "jointtrace needs Python 3.10 to 3.13; '$(PYTHON)' is $(or $(TAG),missing). Name another: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "'$(PYTHON)' has no venv module; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@rm -f $(VENV)/.ready-*
	@$(BIN)/python -c 'import sys; sys.exit("py%d.%d" % sys.version_info[:2] != "$(TAG)")' 2>/dev/null || \
	  $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --upgrade "pip>=23"
	$(BIN)/python -m pip install "torch==$(TORCH)"
	$(BIN)/python -m pip install "torch==$(TORCH)" -e ".[dev]"
	@touch $@
