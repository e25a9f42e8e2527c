# Every target sets up what it needs, from a bare checkout: `make run` is all it takes to have a relay.
# The only things expected of the machine are make and Python 3.11 or newer.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
STAMP := .venv/.complete
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help run test lint types fmt demo bench bench-pipeline bench-tx-rx conformance docs lock wheel deploy-test clean

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(STAMP) ## Run a relay on an embedded PostgreSQL in ./.relayd (ARGS="--port 0" and so on)
	@exec $(BIN)/relayd serve $(ARGS)

# Most system tests wait for something, so two at a time suit even a small machine.
WORKERS ?= 2
test: $(STAMP) ## Run the tests (ARGS="-k cursor", WORKERS=0 for one after the other)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(ARGS)

lint: $(STAMP) ## Check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## Check the types
	$(BIN)/mypy

fmt: $(STAMP) ## Format, and mend what can be mended
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

DEMO ?= demo channel_demo
demo: $(STAMP) ## Watch a relay being killed, and nothing being lost: packets, then channels (DEMO=channel_demo)
	@set -e; for each in $(DEMO); do $(BIN)/python examples/$$each.py $(ARGS); done

bench: $(STAMP) ## Measure a relay on this machine (ARGS="publish fanout")
	$(BIN)/python -m benches $(ARGS)

bench-pipeline: $(STAMP) ## Measure the pipeline beside JDBC, COPY and a process pool (needs Java; takes a while)
	$(BIN)/python -m benches.pipeline $(ARGS)

bench-tx-rx: $(STAMP) ## Measure Tx and Rx beside pyzmq, grpc and bare sockets (five minutes)
	$(BIN)/python -m benches.tx_rx $(ARGS)

conformance: $(STAMP) ## Match requirement rows with tests; writes docs/conformance.md
	$(BIN)/python scripts/conformance.py

docs: $(STAMP) ## Write the pages of docs/ that are made from the code, and deploy/relayd.toml
	$(BIN)/python scripts/reference.py

# The site's tools are added to the environment when it is built for the first time.
.venv/.docs: locks/docs.txt $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r locks/docs.txt
	@touch $@

.PHONY: site
site: .venv/.docs docs ## Build the site into build/site; a warning or a broken link is an error
	rm -rf build/site
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --jobs auto -d build/doctrees -b html docs build/site
	@echo "build/site/index.html"

wheel: $(STAMP) ## Build the wheel into dist/
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

deploy-test: ## Check the alert rules (needs promtool)
	promtool check config deploy/prometheus/prometheus.yml deploy/prometheus/prometheus-tls.yml
	promtool test rules deploy/prometheus/alerts_test.yml

COMPILE = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-header --no-annotate --no-emit-index-url --no-emit-find-links $(LOCKFLAGS)
lock: $(STAMP) ## Renew the lock files (LOCKFLAGS="--upgrade" takes the newest versions)
	$(COMPILE) --extra relay --output-file locks/relay.txt pyproject.toml
	$(COMPILE) --extra pipeline --output-file locks/pipeline.txt pyproject.toml
	$(COMPILE) --extra dev --output-file locks/dev.txt pyproject.toml
	$(COMPILE) --extra docs --constraint locks/dev.txt --output-file locks/docs.txt pyproject.toml
	$(COMPILE) --output-file locks/build.txt locks/build.in

clean: ## Remove what the targets made, but not .relayd
	rm -rf .venv dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(STAMP): locks/dev.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name it with PYTHON=" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r locks/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@
