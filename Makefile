# `make demo` shows that it works, `make test` tests it in one environment, `make test-all` in all of them. They need
# make, Python 3.11 or later and pip's way to the package index; everything is installed into .venv and .tox,
# nothing outside this folder.

PYTHON ?= python3
TOX = .venv/bin/tox
TOX_ARGS ?=
# Environments at a time; `make test-all PARALLEL=1` for one after the other.
PARALLEL ?= auto
# Processes that `make test` runs tests in: as many as there are processors, and at most eight.
JOBS ?= logical
# Of `make demo` and `make test`: more arguments, such as ARGS="-k wire".
ARGS ?=

# The development environment is .venv: the core and its plugins are imported from this checkout.
PLUGINS = testing bench cpu shm lookup pynccl cuda-ipc transformers
EDITABLE = $(PLUGINS:%=plugins/kvplug-%) docs/examples/kvplug-sample
SHM = plugins/kvplug-shm
INSTALLED = .venv/installed-for-tests
INSTALLED_FROM = Makefile constraints.txt pyproject.toml $(EDITABLE:%=%/pyproject.toml) \
	$(SHM)/hatch_build.py $(SHM)/kvplug_shm/native/ring.c
IN_VENV = .venv/bin/python -m pip install --quiet -c constraints.txt
# CONTRIBUTING.md says what the markers mean.
QUICK = not (slow or mutant or variant or full)

.PHONY: demo install test test-all clean

demo: $(TOX)
	$(TOX) run -e demo $(TOX_ARGS) -- $(ARGS)

install: $(INSTALLED)

test: $(INSTALLED)
	.venv/bin/pytest -q -n $(JOBS) --maxprocesses 8 --dist loadgroup --hypothesis-profile dev -m "$(QUICK)" \
		--ignore plugins/kvplug-vllm $(ARGS)

test-all: $(TOX)
	rm -rf .tox/coverage-data .tox/failed-tests
	$(TOX) run-parallel --parallel $(PARALLEL) $(TOX_ARGS) || \
		{ tail -n +1 .tox/failed-tests/* 2>/dev/null; echo "Failed. Above: a line for each environment, then what tests failed."; exit 1; }
	@echo "Passed. A line with SKIP above is an environment whose Python this machine does not have."

$(TOX):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kvplug needs Python 3.11 or later; say which: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet "tox>=4.37,<5"

# Plugins come without what they ask for: the core is there, and NCCL's library, 350 MB, is for `make test-all`.
$(INSTALLED): $(TOX) $(INSTALLED_FROM)
	$(IN_VENV) -e ".[prometheus,scaffold]" accelerate coverage editables gguf hatchling hypothesis import-linter \
		matplotlib mypy numpy pre-commit psutil pytest pytest-timeout pytest-xdist pyzmq ruff torch transformers
	$(IN_VENV) --no-deps --no-build-isolation $(EDITABLE:%=-e ./%)
	touch $@

clean:
	rm -rf .venv .tox .coverage* .pytest_cache .mypy_cache .ruff_cache .hypothesis docs/_build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
