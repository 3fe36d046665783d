# Everything runs in .venv, which the first command creates. Needs Python 3.10 or newer (tested: 3.11) and the package index.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# Exact versions for Python 3.11. A Python that is too old for them does without: make test CONSTRAINTS=/dev/null
CONSTRAINTS ?= constraints.txt
SOURCES := $(shell find memnorm -name '*.py' -o -name '*.j2' -o -name '*.cpp' -o -name '*.h') memnorm/py.typed pyproject.toml setup.py README.md LICENSE

.PHONY: test test-full test-ecosystem test-torch demo docs bench dist lint format clean

test: .venv/installed lint
	$(BIN)/pytest -n 2

test-full: .venv/full .venv/installed lint
	$(BIN)/python tests/full.py

# The table of docs lists failures as well.
test-ecosystem: .venv-ecosystem/installed .venv/installed
	.venv-ecosystem/bin/python tests/ecosystem/run.py; result=$$?; $(BIN)/python -m study.pages && exit $$result

# The tests of the layers with another torch, in an environment of its own: make test-torch VERSION=2.8.0
test-torch:
	@test -n '$(VERSION)' || { echo 'make test-torch: which version of torch? VERSION=2.8.0' >&2; exit 2; }
	$(PYTHON) -m venv .venv-torch-$(VERSION)
	grep -v '^torch==' constraints.txt > .venv-torch-$(VERSION)/constraints.txt
	.venv-torch-$(VERSION)/bin/pip install --quiet --disable-pip-version-check -c .venv-torch-$(VERSION)/constraints.txt \
		torch==$(VERSION) '.[lab,dev]'
	.venv-torch-$(VERSION)/bin/python tests/full.py core

# What a release uploads: a source archive, and a wheel made of it that works in an empty environment.
dist:
	rm -rf .venv-dist dist build
	$(PYTHON) -m venv .venv-dist/tools
	.venv-dist/tools/bin/pip install --quiet --disable-pip-version-check build twine
	.venv-dist/tools/bin/pyproject-build
	.venv-dist/tools/bin/twine check --strict dist/*
	$(PYTHON) -m venv .venv-dist/empty
	.venv-dist/empty/bin/pip install --quiet --disable-pip-version-check dist/memnorm-*.whl
	cd .venv-dist && empty/bin/memnorm check

demo: .venv/installed
	$(BIN)/memnorm demo

docs: .venv/docs .venv/installed
	$(BIN)/sphinx-build --fail-on-warning --keep-going --nitpicky --quiet docs site

bench: .venv/installed
	$(BIN)/memnorm bench all --out results/bench.json
	$(BIN)/python -m study.pages

lint: .venv/dependencies
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/dependencies
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Without kernels: these come with the wheel below.
.venv/dependencies: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv .venv
	MEMNORM_KERNELS=off $(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) '.[lab,dev]'
	touch $@

# What the slow tests run against besides: trainers, the examples' data, export, Ray. Heavy, so `make test` does without.
.venv/full: .venv/dependencies
	MEMNORM_KERNELS=off $(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) '.[deployment,docs,examples,ray]'
	touch $@

.venv/docs: .venv/dependencies
	MEMNORM_KERNELS=off $(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) '.[docs]'
	touch $@

# The newest versions of what other people train with, not ours: several GB.
.venv-ecosystem/dependencies:
	$(PYTHON) -m venv .venv-ecosystem
	.venv-ecosystem/bin/pip install --quiet --disable-pip-version-check \
		torch torchvision timm segmentation-models-pytorch monai ultralytics pytest
	touch $@

.venv-ecosystem/installed: .venv-ecosystem/dependencies .venv/installed
	.venv-ecosystem/bin/pip install --quiet --disable-pip-version-check --no-deps --force-reinstall dist/memnorm-*.whl
	touch $@

# The tests run against an installed wheel, not against the source tree.
.venv/installed: .venv/dependencies $(wildcard .venv/full .venv/docs) $(SOURCES)
	rm -rf dist build
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --force-reinstall dist/memnorm-*.whl
	touch $@

clean:
	rm -rf .venv .venv-* dist build site *.egg-info .mypy_cache .pytest_cache .ruff_cache
