# make run    serve HTTP on uringloop beside uvloop and asyncio, and print the table
# make test   everything the test suite has, on $(PYTHON)
# make help   the rest
#
# Each Python gets a virtual environment of its own under .venv/. Nothing else is installed but the
# headers of liburing, and redis-server for conform, where they are missing and the system's package
# manager is apt.

PYTHON ?= python3
PYTHONS ?= 3.11 3.12 3.13
ROUNDS ?= 3
BENCH_ARGS ?=
PYTEST_ARGS ?=
SUITES ?=
KINDS ?= io_uring,epoll
REPEAT ?= 5
EXAMPLES ?= 2000
fault_tests := tests/faults tests/models $(addprefix tests/test_,wrong_owner.py changing_owners.py \
    dropped.py hostile_code.py ends_of_loops.py fork_points.py threads.py subinterpreters.py limits.py bad_input.py)
FAST_SUITES := stdlib,uvloop,janus,asgiref,httpcore,aioquic
CONFORM_ARGS ?=
MINUTES ?= 2
SEED ?=
SOAK_ARGS ?=

version := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
ifeq ($(version),)
$(error PYTHON=$(PYTHON) is not a Python that runs)
endif
venv := .venv/$(version)
python := $(venv)/bin/python
# The suites of other projects run on PYTHON, the standard library's on each of these.
ifneq ($(if $(SUITES),$(findstring stdlib,$(SUITES)),stdlib),)
conform_pythons := $(if $(filter command environment,$(firstword $(origin PYTHON))),,$(PYTHONS))
endif
sources := setup.py pyproject.toml $(shell find uringloop -name '*.py' -o -name '*.p[yx][xdi]' -o -name '*.h')

# All that is written in C by hand; what Cython generates is not held to these.
c_sources := $(wildcard uringloop/*/*.h tests/proving/*.h benchmarks/*.c)
c_warnings := -Werror -Wall -Wextra -Wconversion

.PHONY: help run test test-epoll test-refused test-pythons conform conform-fast faults asan soak bench build lint dist clean liburing redis

help:
	@echo 'make run            HTTP under load on four event loops (about two minutes)'
	@echo 'make test           the test suite; PYTHON=python3.12 chooses another Python'
	@echo 'make test-epoll     the test suite with io_uring switched off'
	@echo 'make test-refused   the test suite where a seccomp filter refuses io_uring'
	@echo 'make test-pythons   make test on each of $(PYTHONS) that is installed'
	@echo 'make conform        the suites of CPython and of other projects; SUITES=janus,uvloop chooses'
	@echo 'make conform-fast   some of them on one Python (five minutes)'
	@echo 'make faults         faults, models, forks, threads, bad input; KINDS=, REPEAT=, EXAMPLES='
	@echo 'make asan           the test suite on a build with ASAN, UBSAN and LeakSanitizer'
	@echo 'make soak           load and chaos for MINUTES=2: nothing lost, nothing leaked; KINDS=, SEED='
	@echo "make bench          every benchmark that has a target (half an hour); BENCH_ARGS='--quick --rows tls*'"
	@echo 'make lint           ruff, cython-lint, mypy, stubtest, and gcc on what is written in C'
	@echo 'make dist           sdist and wheel, each installed and imported once'
	@echo 'make clean          remove what was built'

run: build
	@command -v wrk >/dev/null || echo 'wrk is not installed (apt-get install wrk): using a Python client'
	$(python) -m benchmarks http

test: build
	$(python) -X dev -W error -m pytest tests $(PYTEST_ARGS)

test-epoll: build
	URINGLOOP_BACKEND=epoll $(python) -m pytest tests $(PYTEST_ARGS)

test-refused: build
	$(python) tests/refuse_io_uring.py $(python) -m pytest tests $(PYTEST_ARGS)

test-pythons:
	@for version in $(PYTHONS); do \
	    python=$$(sh tools/find-python $$version) || { echo "no Python $$version: not tested"; continue; }; \
	    echo "=== Python $$version ($$python)"; \
	    $(MAKE) test PYTHON=$$python || exit 1; \
	done

# tests/ecosystem/README.md; FRESH=1 repeats asyncio's and uvloop's runs.
conform: build redis
	@set --; \
	for version in $(conform_pythons); do \
	    [ $$version != $(version) ] || continue; \
	    python=$$(sh tools/find-python $$version) || { echo "no Python $$version: not tested"; continue; }; \
	    $(MAKE) build PYTHON=$$python || exit 1; \
	    set -- "$$@" .venv/$$version/bin/python; \
	done; \
	PYTHONPATH=tests $(python) -m conform --suites '$(SUITES)' $(if $(FRESH),--fresh) \
	    $(CONFORM_ARGS) $(python) "$$@"

conform-fast:
	$(MAKE) conform PYTHON=$(PYTHON) SUITES=$(FAST_SUITES) CONFORM_ARGS='--loops asyncio,io_uring,epoll'

# The engine with handles for tests beside it (tests/proving): faults put into the real ring.
faults: build
	@command -v strace >/dev/null || echo 'strace is not installed (apt-get install strace): no system calls fail'
	URINGLOOP_PROVING=1 $(python) setup.py -q build --build-lib build/proving-$(version) \
	    --build-temp build/proving-$(version)-objects
	PYTHONPATH=$(CURDIR)/build/proving-$(version) URINGLOOP_REPEAT=$(REPEAT) \
	URINGLOOP_EXAMPLES=$(EXAMPLES) \
	    $(venv)/bin/pytest $(fault_tests) --kinds $(KINDS) --timeout 1800 -rs $(PYTEST_ARGS)

# The sanitizers' runtime must be loaded before Python. Leaks are looked for at the end of the
# session (tests/conftest.py): what Python leaves behind at its own exit is not ours.
asan: build
	URINGLOOP_PROVING=1 URINGLOOP_SANITIZE=1 $(python) setup.py -q build --build-lib build/asan-$(version) \
	    --build-temp build/asan-$(version)-objects
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=1:leak_check_at_exit=0:strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1 \
	PYTHONMALLOC=malloc PYTHONPATH=$(CURDIR)/build/asan-$(version) \
	    $(venv)/bin/pytest tests --kinds io_uring,epoll --timeout 300 $(PYTEST_ARGS)

# SOAK_ARGS='--scenarios churn --churn 1000000' and the like: tests/soak/__main__.py.
soak: build
	@mkdir -p build/soak
	PYTHONPATH=tests $(python) -m soak --minutes $(MINUTES) --kinds $(KINDS) \
	    $(if $(SEED),--seed $(SEED)) --json build/soak/soak.json $(SOAK_ARGS)

bench: build
	$(python) -m benchmarks table --rounds $(ROUNDS) $(BENCH_ARGS)

lint: build
	$(python) -m pip install -q 'ruff>=0.15,<1' 'mypy>=1.18,<3' 'cython-lint>=0.19,<1'
	$(venv)/bin/ruff check uringloop tests benchmarks setup.py
	PATH="$(CURDIR)/$(venv)/bin:$$PATH" $(venv)/bin/cython-lint uringloop
	$(venv)/bin/mypy --strict uringloop
	$(python) -m mypy.stubtest uringloop --mypy-config-file pyproject.toml --allowlist tests/stubtest-allowlist.txt
	@set -e; include=$$($(python) -c 'import sysconfig; print(sysconfig.get_path("include"))'); \
	for file in $(c_sources); do \
	    echo "gcc -fsyntax-only $(c_warnings) $$file"; \
	    gcc -x c -fsyntax-only $(c_warnings) -isystem "$$include" $$file; \
	done

dist: build
	$(python) -m pip install -q build
	rm -rf dist
	$(python) -m build
	sh tools/check-dist $(PYTHON)

build: $(venv)/built

$(venv)/bin/python:
	$(PYTHON) -m venv $(venv)

$(venv)/built: $(venv)/bin/python $(sources) | liburing
	$(python) -m pip install -q --disable-pip-version-check 'setuptools>=77' 'Cython>=3.3,<4'
	$(python) -m pip install -q --disable-pip-version-check --no-build-isolation -e '.[test]'
	@touch $@

liburing:
	@pkg-config --exists 'liburing >= 2.3' 2>/dev/null || sh tools/install-liburing

redis:
	@command -v redis-server >/dev/null || sh tools/install-redis

clean:
	rm -rf build dist .venv *.egg-info uringloop/*.so uringloop/_core.c .*_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
