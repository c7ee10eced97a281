# make test | demo | lint | docs | build | wheel | clean: each sets up .venv itself, with nothing but Python >= 3.10, a C++
# compiler and make on the machine. Settings, all given as `make test NAME=value`:
#   TORCH=torch==2.13.0      the torch to install (default: the newest)
#   MOE_EXT_BUILD_CUDA=...   auto, on, off or prebuilt (default: auto where a GPU is visible, else off)
#   PYTHON=python3           the interpreter that makes .venv
#   OFFLINE=1                no network and no .venv: PYTHON itself, with python/moe_ext/moe_ext_cuda.so if it is there
#   ARGS=...                 further arguments of the demo or of pytest (CONTRIBUTING.md has those for parallel tests)
PYTHON ?= python3
TORCH ?= torch
OFFLINE ?=
ARGS ?=

GPU := $(shell ls /dev/nvidia[0-9]* 2>/dev/null || nvidia-smi -L 2>/dev/null)
MOE_EXT_BUILD_CUDA ?= $(if $(GPU),auto,off)
LIBRARY := python/moe_ext/moe_ext_cuda.so

ifeq ($(OFFLINE),)
  RUN := .venv/bin/python
  SETUP = @$(PYTHON) tools/environment.py --torch '$(TORCH)' --cuda $(MOE_EXT_BUILD_CUDA) --extras
else
  RUN := PYTHONPATH=python $(PYTHON)
  SETUP = @$(PYTHON) tools/build_planner.py \#
endif

.PHONY: test demo lint docs build wheel clean
.DEFAULT_GOAL := test

test:
	$(SETUP) test,bench,cli
	$(RUN) -m pytest $(if $(GPU),,-m "not gpu") $(ARGS)

demo:
	$(SETUP) demo
	$(RUN) examples/moe_layer.py $(ARGS)

lint:
	$(SETUP) lint
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	find csrc -name '*.cpp' -o -name '*.hpp' -o -name '*.cuh' -o -name '*.cu' | xargs .venv/bin/clang-format --dry-run -Werror
	.venv/bin/codespell

# The site, into build/site; a warning is an error, but not to `--quiet`, which counts none.
docs:
	$(SETUP) docs
	$(RUN) -m mkdocs build --strict

# Every instantiation, into python/moe_ext, then the check of what came out.
build: MOE_EXT_BUILD_CUDA := on
build:
	$(SETUP) binary
	$(RUN) tools/check_binary.py $(LIBRARY) --logs build/cmake-$$($(RUN) -c 'import sysconfig; print(sysconfig.get_config_var("SOABI"))')-cuda

# For this Python, then installed where nothing else is, and run there.
wheel:
	$(SETUP) cli
	MOE_EXT_BUILD_CUDA=$(MOE_EXT_BUILD_CUDA) $(RUN) -m pip wheel --no-deps --no-build-isolation --wheel-dir dist .
	$(RUN) tools/check_wheel.py dist --library $(LIBRARY)

clean:
	rm -rf .venv build dist python/moe_ext/*.so python/*.egg-info .pytest_cache .mypy_cache .ruff_cache
