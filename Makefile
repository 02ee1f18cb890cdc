# make demo       Set up and run the built-in task.
# make test-fast  For daily work: ruff, the import contracts, and every test that needs no training run.
# make test       Everything: ruff, the import contracts, mypy and every test.
# make lint       The same without the tests.
# make docs       The documentation site, in site/; a broken link is an error.
#
# A test that trains a model, waits for processes or a browser, or takes seconds is marked `slow`; tests/conftest.py
# marks those that use the fixture `finished`. Two processes share the tests, file by file; WORKERS=0 runs them in one.
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=25

.PHONY: demo test test-fast lint style bench docs clean

demo: $(VENV)/.installed
	$(BIN)/cdtrans demo

test test-fast: export OMP_NUM_THREADS = 1
test test-fast: export PYTHONDONTWRITEBYTECODE =  # kept bytecode saves a fifth of test-fast
test: lint
	$(PYTEST)

test-fast: style
	$(PYTEST) -m "not slow"

lint: style
	$(BIN)/mypy

style: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

bench: $(VENV)/.installed
	for b in train_step pair_search decode predict pipeline; do $(BIN)/python benchmarks/$$b.py || exit 1; done

docs: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) build src/*.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@
