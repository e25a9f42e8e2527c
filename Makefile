# Every target sets up what it needs, from a bare checkout: `make run` is all it takes to have a relay.
# The only things expected of the machine are make and Python 3.11 or newer.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
ARGS ?=

# What a target needs is a lock file, and .venv/.<its name> says that those packages are there.
RELAY := .venv/.relay
DEV := .venv/.dev
WEB := web/node_modules/.package-lock.json

# Hundreds of processes import the same modules here: bytecode is kept even where the environment asks not to.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help run pipeline demo check lint types test unit coverage fmt bench bench-pipeline bench-tx-rx bench-console \
	conformance docs faults fuzz planted site lock wheel deploy-test web test-web vectors screens clean

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(RELAY) ## Run a relay on an embedded PostgreSQL in ./.relayd (ARGS="--port 0" and so on)
	@echo "Starting relayd; its first start makes a database" >&2
	@exec $(BIN)/relayd serve $(ARGS)

DEMO ?= demo channel_demo
demo: $(RELAY) ## Watch a relay being killed and nothing being lost: packets, then channels (DEMO=demo)
	@set -e; for each in $(DEMO); do $(BIN)/python examples/$$each.py $(ARGS); done

pipeline: .venv/.pipeline ## Install what strata-pipeline needs beside the relay (it needs Java too)

# What fails beside five others on a machine that others keep busy has to pass alone, and both runs are shown.
check: lint types ## Everything that has to pass before a change is taken; .ci/run is the same
	@$(MAKE) test || { echo "Failed tests are run once more, one after the other:"; \
		$(MAKE) test WORKERS=0 ARGS="--last-failed --last-failed-no-failures none"; }

lint: $(DEV) ## Check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# It fails with 2 where its workers do not start within three seconds, as on a busy machine: then one process does it.
types: $(DEV) ## Check the types
	$(BIN)/mypy --num-workers auto || { [ $$? -eq 2 ] && $(BIN)/mypy; }

# Most system tests wait for something, so six at a time suit a machine with two cores.
WORKERS ?= 6
PYTEST = -m pytest --workers $(WORKERS) --durations 20 --durations-min 1
# Where npm is there, what is in web/ is tested too; without it those tests are skipped, and say so.
test: $(DEV) $(if $(shell command -v npm),$(WEB)) ## Run all tests (ARGS="-k cursor", WORKERS=0 for one after the other)
	$(BIN)/python $(PYTEST) $(ARGS)

# The tests that need no process and no database, as tests/conftest.py marks them.
UNIT ?= tests/strata tests/relayd tests/test_layout.py -m unit
# They compute and wait for nothing: a worker for each core.
QUICK = --workers cores
unit: $(DEV) ## Run the quick tests, for the daily loop (ARGS="-k cursor")
	$(BIN)/python $(PYTEST) $(UNIT) $(QUICK) --hypothesis-profile daily $(ARGS)

faults: $(DEV) ## Run a relay under kills, a bad disk, network and clock (ARGS="--minutes 60 --seed 7")
	$(BIN)/python -m tests.faults $(ARGS)

planted: $(DEV) ## Plant known bugs one by one and see whether the tests find them (ARGS="--first 3")
	$(BIN)/python -m tests.planted $(ARGS)

fuzz: $(DEV) ## Send a live relay good and spoiled messages (ARGS="--minutes 60 --seed 7")
	$(BIN)/python -m tests.fuzz $(ARGS)

coverage: $(DEV) ## Measure what the quick tests reach: a table, and pages in build/coverage
	@mkdir -p build
	$(BIN)/coverage erase
	$(BIN)/coverage run $(PYTEST) $(UNIT) $(QUICK) --timeout 600 $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage html --quiet
	$(BIN)/coverage report

fmt: $(DEV) ## Format, and mend what can be mended
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(DEV) ## Measure a relay on this machine (ARGS="publish fanout")
	$(BIN)/python -m benches $(ARGS)

bench-pipeline: $(DEV) ## Measure the pipeline beside JDBC, COPY and a process pool (needs Java; takes a while)
	$(BIN)/python -m benches.pipeline $(ARGS)

bench-tx-rx: $(DEV) ## Measure Tx and Rx beside pyzmq, grpc and bare sockets (five minutes)
	$(BIN)/python -m benches.tx_rx $(ARGS)

conformance: $(DEV) ## Match requirement rows with tests; writes docs/conformance.md
	$(BIN)/python scripts/conformance.py

docs: $(DEV) ## Write the pages of docs/ that are made from the code, and deploy/relayd.toml
	$(BIN)/python scripts/reference.py

# The site's tools are added to .venv when the site is built for the first time.
site: .venv/.docs docs ## Build the site into build/site; a warning or a broken link is an error
	rm -rf build/site
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --jobs auto -d build/doctrees -b html docs build/site
	@echo "build/site/index.html"

screens: $(DEV) $(if $(shell command -v npm),$(WEB)) ## Take pictures of every page into build/screens (needs Chromium and Node)
	$(BIN)/python -m tests.support.screens $(ARGS)

bench-console: $(DEV) ## Measure the console's page under a flood (ARGS="--seconds 600"; needs Chromium)
	$(BIN)/python -m tests.support.console_load $(ARGS)

wheel: $(DEV) ## Build the wheels into dist/
	@for each in client relayd pipeline testkit; do \
		(cd $$each && ../$(BIN)/hatchling build --target wheel --directory ../dist) || exit 1; done

# relayd/console is committed, so that only who changes web/ needs Node.
web: $(WEB) ## Build the TypeScript client, and the console into relayd/console (needs Node 22)
	cd web && npm run --silent types && node build.mjs client && node build.mjs console

test-web: $(WEB) $(DEV) ## Check and test what is in web/, against relays and in a browser too (needs Node 22)
	cd web && npm run --silent types
	RELAYD_REQUIRE_NODE=1 $(BIN)/python -m pytest tests/web tests/system/test_web_*.py \
		tests/system/test_console*.py tests/relayd/http $(ARGS)

vectors: $(DEV) ## Write what the Python and the TypeScript client must agree on (web/vectors)
	$(BIN)/python -m tests.web.vectors

deploy-test: ## Check the alert rules (needs promtool)
	promtool check config deploy/prometheus/prometheus.yml deploy/prometheus/prometheus-tls.yml
	cd deploy/prometheus && promtool test rules alerts_test.yml slow_alerts_test.yml pipeline_alerts_test.yml

# Every lock takes the versions of the largest, so that stages can share .venv. Ours are installed from this checkout.
OURS = $(foreach each,strata-sdk relayd strata-pipeline strata-testkit,--no-emit-package $(each))
COMPILE = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes $(OURS) \
	--no-header --no-annotate --no-emit-index-url --no-emit-find-links $(LOCKFLAGS)
PROJECTS = $(foreach each,client relayd pipeline testkit,$(each)/pyproject.toml)
lock: $(DEV) ## Renew the lock files (LOCKFLAGS="--upgrade" takes the newest versions)
	$(COMPILE) --all-extras --output-file locks/dev.txt locks/dev.in $(PROJECTS)
	$(COMPILE) --extra channels --constraint locks/dev.txt --output-file locks/relay.txt relayd/pyproject.toml client/pyproject.toml
	$(COMPILE) --extra bus --extra tracing --constraint locks/dev.txt --output-file locks/image.txt relayd/pyproject.toml
	$(COMPILE) --extra spark --constraint locks/dev.txt --output-file locks/pipeline.txt pipeline/pyproject.toml
	$(COMPILE) --constraint locks/dev.txt --output-file locks/docs.txt locks/docs.in
	$(COMPILE) --constraint locks/dev.txt --output-file locks/build.txt locks/build.in
	$(COMPILE) --output-file locks/uv.txt locks/uv.in

clean: ## Remove what the targets made, but not .relayd
	rm -rf .venv dist build .coverage .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(WEB): web/package-lock.json
	cd web && npm ci
	@touch $@

.venv/.%: locks/%.txt locks/build.txt locks/uv.txt $(PROJECTS)
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name it with PYTHON=" >&2; exit 1; }
	@PYTHON="$(PYTHON)" scripts/install.sh $* >&2
	@touch $@ $(if $(filter dev,$*),.venv/.relay .venv/.pipeline)  # which it holds
