# make demo   set up .venv, compare AdamW and Coupled Adam over three seeds on built-in text, print where the report is
# make test   set up .venv, run the linters, the type checker and all tests
# make docs   set up .venv, build the documentation as a site: site/index.html opens without a server or a network
# make bench  set up .venv, print step time and memory against torch.optim.AdamW
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two OpenMP threads that spin while waiting can be 20 times slower beside one other busy process.
export OMP_WAIT_POLICY := PASSIVE
export GOMP_SPINCOUNT := 0
# pip would compile all 23,000 modules (--no-compile); Python compiles those that are imported, once, if it may write them.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test lint types docs bench clean

help:
	@sed -n 's/^# \(make \)/\1/p' Makefile

# A stamp is newer than pyproject.toml only after a complete installation, so an interrupted one is repeated.
$(VENV)/.installed-study $(VENV)/.installed-dev $(VENV)/.installed-docs: $(VENV)/.installed-%: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "coupled-adam needs Python 3.11 or newer; set PYTHON=")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@

demo: $(VENV)/.installed-study
	$(BIN)/coupled-adam demo

# Two files at a time: most tests wait for processes they have started, or use one core.
test: lint types
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: $(VENV)/.installed-dev
	MYPY_NUM_WORKERS=2 $(BIN)/mypy

# A page outside of the navigation, a dead link or a formula that cannot be drawn ends the build.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Measured as users run it: with OpenMP's own defaults.
bench: $(VENV)/.installed-dev
	env -u OMP_WAIT_POLICY -u GOMP_SPINCOUNT $(BIN)/python benchmarks/step.py

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis runs/demo data/python-docs-bpe4096
