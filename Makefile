# make serve and make test each do all their own set-up; everything lands in .venv and the model
# cache (OCTAVO_HOME, else the XDG cache).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
HOST ?= 127.0.0.1
PORT ?= 8000
WORKERS ?= 3

export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: serve test test-train sanitize setup native models lint long mutants bench wheel clean

serve: setup  ## pull smollm2 and serve it on http://127.0.0.1:8000
	$(BIN)/octavo pull smollm2
	@echo "serving on http://$(HOST):$(PORT); stop with Ctrl-C"
	$(BIN)/octavo serve smollm2 --host $(HOST) --port $(PORT)

test: setup models lint  ## lint, types and tests (minutes)
	OCTAVO_TEST_MODELS=required $(BIN)/pytest -q -n $(WORKERS) --dist loadfile

test-train: setup  ## the tests of training, which make test skips: with PyTorch, in .venv
	$(BIN)/python -m pip install --quiet --config-settings=wheel.cmake=false --editable ".[dev,train]"
	$(BIN)/pytest -q tests/tools/train tests/cli/test_train.py

sanitize: setup  ## the C++ tests under address, undefined-behaviour and thread sanitizers
	$(BIN)/pytest -q -m sanitize

mutants: setup models  ## mutation testing of the core, a seeded sample (two hours)
	$(BIN)/python -m pip install --quiet --config-settings=wheel.cmake=false --editable ".[dev,mutants]"
	$(BIN)/python tests/mutants.py

long: setup models  ## the long runs of the property tests (hours)
	OCTAVO_TEST_MODELS=required $(BIN)/pytest -q -m long --timeout 0 --hypothesis-profile search

# Without the scripts that work on a folder or file that is named to them.
NAMED := behaviour families k_quants make_quantized quantized_readers second_turn
bench: setup models  ## what produces the published figures
	for script in $(filter-out $(NAMED:%=benchmarks/%.py),$(wildcard benchmarks/[!_]*.py)); do $(BIN)/python $$script || exit 1; done

# Any one Python builds the wheel for all: tests/test_wheel.py tries it with each one that it finds.
wheel: setup models  ## one wheel for Python 3.11 and later in dist/, installed and tried (minutes)
	@rm -rf build/wheel dist
	@echo "building the wheel"
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation \
	  --wheel-dir build/wheel .
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl
	@ls -sh dist
	$(BIN)/pytest -q -rs -m wheel tests/test_wheel.py

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $$(git ls-files '*.cpp' '*.h')

models: setup
	$(BIN)/octavo pull smollm2 gemma3-270m

setup: $(VENV)/.ready $(VENV)/.native  ## .venv with everything, the native module built

# The package is installed as links to src/; the native module is built apart, so that an edited
# kernel costs an incremental build and not an install.
$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than Python 3.11; run make PYTHON=…"; exit 1; }
	@echo "setting up $(VENV) (once; a few minutes)"
	@test -x $(BIN)/python || { rm -rf build/dev; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -m pip install --quiet --config-settings=wheel.cmake=false --editable ".[dev]"
	@touch $@

NATIVE := CMakeLists.txt $(shell find kernels -name '*.cpp' -o -name '*.h')

$(VENV)/.native: $(VENV)/.ready $(NATIVE)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(MAKE) --no-print-directory native PYTHON="$(CURDIR)/$(BIN)/python"
	@touch $@

native:  ## the C++ kernels, in place, with PYTHON's cmake, ninja and nanobind
	@mkdir -p build
	@rm -f src/octavo/_native.cpython-*.so # of builds for one version: Python would prefer them
	@echo "building the kernels"
	@cmake -S . -B build/dev -G Ninja -DOCTAVO_IN_PLACE=ON -DPython_EXECUTABLE=$$(command -v $(PYTHON)) \
	  > build/configure.log 2>&1 || { cat build/configure.log; exit 1; }
	@cmake --build build/dev

clean:
	rm -rf $(VENV) build dist src/octavo/_native*.so
