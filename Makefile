# Everything runs in .venv, which the first target that needs it sets up.
#   PYTHON=/path/to/python3.12   interpreter for it (default: the first one found)
#   PYTEST_ARGS="-k ledger -x"   more arguments for pytest
#   WORKERS=4                    processes of `make test`

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
NEWEST := .venv-flower-newest
WORKERS := 2
CANDIDATES := python3.11 python3.12 python3 python

# `make test` leaves out what is slow or needs a GPU, the network or hours.
ORDINARY := not slow and not gpu and not network and not paper and not browser and not multihost and not tutorial

# What uses Flower's own functions, and a deployment and a simulation on it.
FLOWER_TESTS := tests/clients tests/server tests/app/test_deploy.py tests/test_repository.py
PURELIB := python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

.DEFAULT_GOAL := help
.PHONY: help setup lock demo check check-flower docs test test-all browser tutorials multihost incidents golden bench clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Create .venv with Python 3.11 or 3.12 and the pinned packages

lock: $(STAMP) ## Raise every version in uv.lock to the newest that pyproject.toml allows
	$(BIN)/uv lock --quiet --upgrade

demo: $(STAMP) ## Train on the embedded digits through Flower and show the result
	$(BIN)/fedgs demo

check: $(STAMP) docs ## Lint, formatting, types, the import rule, the documentation
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/python -m pyright
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest -q tests/test_architecture.py tests/test_repository.py

check-flower: $(STAMP) ## The tests that touch Flower, on the pinned one and on its newest release
	$(BIN)/python -m pytest -m "$(ORDINARY)" $(FLOWER_TESTS) $(PYTEST_ARGS)
	$(BIN)/python -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade "flwr[simulation]"
	@# All other packages are those of the pinned environment.
	echo "import site; site.addsitedir('$$($(BIN)/$(PURELIB))')" > "$$($(NEWEST)/bin/$(PURELIB))/pinned.pth"
	$(NEWEST)/bin/python -m pytest -m "$(ORDINARY)" $(FLOWER_TESTS) $(PYTEST_ARGS)

docs: $(STAMP) ## The documentation as a site, in site/: pages, reference, tutorials
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

test: $(STAMP) ## The ordinary tests: on the CPU, offline, under five minutes
	$(BIN)/python -m pytest -m "$(ORDINARY)" -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

test-all: $(STAMP) ## Every test; what the machine cannot run is skipped with a reason
	$(BIN)/python -m pytest $(PYTEST_ARGS)

browser: $(STAMP) ## The report in a headless Chromium, if there is one
	$(BIN)/python -m pytest -m browser $(PYTEST_ARGS)

tutorials: $(STAMP) ## The notebooks of docs/tutorials, at a small size
	$(BIN)/python -m pytest -m tutorial $(PYTEST_ARGS)

multihost: $(STAMP) ## Server and clients on three hosts in network namespaces; needs root
	$(BIN)/python -m pytest -m multihost $(PYTEST_ARGS)

incidents: $(STAMP) ## Kill, cut and fill a deployment of three hosts (root; ONLY=link)
	$(BIN)/python -m pytest -s -m multihost tests/server/test_incidents.py -k "$(ONLY)" $(PYTEST_ARGS)

golden: $(STAMP) ## Rewrite the golden numbers (explain the change in CHANGELOG.md)
	$(BIN)/python -m pytest tests/round/test_golden.py tests/round/test_golden_recipes.py --update-golden $(PYTEST_ARGS)

bench: $(STAMP) ## Measure speed and memory on this machine
	$(BIN)/fedgs bench

clean: ## Remove caches and built packages (never .venv or runs)
	rm -rf build dist site *.egg-info *.fab .benchmarks .hypothesis .pytest_cache .ruff_cache .import_linter_cache
	find fedgs clients server experiments tests -type d -name __pycache__ -prune -exec rm -rf {} +

# The interpreter is tried, not only looked up: a version manager's shim may exist
# without its Python, and Debian's Python without the module that makes environments.
$(STAMP): pyproject.toml uv.lock
	@for python in $(or $(PYTHON),$(CANDIDATES)); do \
	  if "$$python" -c 'import ensurepip, sys, venv; \
	    sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then \
	    echo "make: $(VENV) from $$python"; "$$python" -m venv $(VENV) && exit 0; exit 1; \
	  fi; \
	done; \
	echo "make: no usable Python 3.11 or 3.12 among: $(or $(PYTHON),$(CANDIDATES))." >&2; \
	echo "make: install one with its venv module, or name it: make setup PYTHON=/path/to/python3.12" >&2; \
	exit 1
	@echo "make: installing the pinned packages: some minutes, about 6 GB with CUDA"
	$(BIN)/python -m pip install --quiet uv
	@# The versions of the lock, from any index: of PyTorch there is one for each device.
	$(BIN)/uv export --quiet --frozen --all-extras --all-groups --no-hashes --no-emit-project --output-file $(VENV)/versions.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode --constraint $(VENV)/versions.txt --group datasets --editable ".[all,dev]"
	@touch $@
