# Two commands set everything up: `make demo` and `make test`. They need make, Python 3.11 or later and pip's
# way to the package index; everything is installed into .venv and .tox, nothing outside this folder.

PYTHON ?= python3
TOX = .venv/bin/tox
TOX_ARGS ?=
# Environments at a time; `make test PARALLEL=1` for one after the other.
PARALLEL ?= auto
ARGS ?=

.PHONY: demo test clean

demo: $(TOX)
	$(TOX) run -e demo $(TOX_ARGS) -- $(ARGS)

test: $(TOX)
	rm -rf .tox/coverage-data .tox/failed-tests
	$(TOX) run-parallel --parallel $(PARALLEL) $(TOX_ARGS) || \
		{ tail -n +1 .tox/failed-tests/* 2>/dev/null; echo "Failed. Above: a line for each environment, then what tests failed."; exit 1; }
	@echo "Passed. A line with SKIP above is an environment whose Python this machine does not have."

$(TOX):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kvplug needs Python 3.11 or later; say which: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet "tox>=4.37,<5"

clean:
	rm -rf .venv .tox .coverage* .pytest_cache .mypy_cache .ruff_cache .hypothesis docs/_build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
