# Everything a contributor runs. Needs Python >= 3.10 and make; the rest is installed into .venv.

PYTHON      ?= python3
PYTEST_ARGS ?=
WORKERS     ?= 3
VENV        := .venv
BIN         := $(VENV)/bin
COMPILED    := $(BIN)/python -m compileall -q src tests benchmarks # once here, instead of in each process a test starts
# pytest keeps the tests it rewrites, wherever else bytecode is not to be written: six seconds of each worker
PYTEST      := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
READY       := $(VENV)/.ready
SOAKED      := build/soak.jsonl
PIP         := $(BIN)/python -m pip --disable-pip-version-check -qq

.DEFAULT_GOAL := help
.PHONY: help demo test quick lint types soak bench docs clean always

help: ## list the targets
	@echo "Onefold: make TARGET"
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## train a small GPT at stage 3 on two local CPU processes, about two minutes, and report
	@CUDA_VISIBLE_DEVICES= $(BIN)/onefold train --ranks 2 --out runs/demo-$$(date +%Y%m%d-%H%M%S)

test: lint types ## lint, types and the whole suite, three files at once (WORKERS=3); PYTEST_ARGS="-k name" narrows it
	@$(COMPILED)
	@$(PYTEST) $(PYTEST_ARGS)

quick: lint types ## the inner loop, under two minutes: lint, types, unit tests, one sweep over stages
	@$(COMPILED)
	@$(PYTEST) tests/unit tests/parity/test_stages.py $(PYTEST_ARGS)

lint: $(READY) ## ruff over the whole tree
	@$(BIN)/ruff check .

types: $(READY) ## mypy over src/onefold
	@$(BIN)/mypy

soak: $(READY) ## the suite with its long-running tests; what they did goes to docs/results/soak.md
	@$(COMPILED)
	@rm -f $(SOAKED)
	@$(PYTEST) --soak --soak-record $(SOAKED) $(PYTEST_ARGS); ended=$$?; \
		if [ -e $(SOAKED) ]; then $(BIN)/python -m tools.soak_table $(SOAKED); fi; exit $$ended

bench: $(READY) ## measure against DDP, FSDP2 and DeepSpeed on this machine's CPU, and write the tables
	@$(BIN)/python -m benchmarks.cpu
	@$(BIN)/python -m benchmarks.table

docs: $(READY) ## write the API reference, the maps of rooms and the measured tables
	@$(BIN)/python -m tools.api_reference
	@$(BIN)/python -m tools.rooms
	@$(BIN)/python -m benchmarks.table
	@$(BIN)/python -m tools.soak_table

clean: ## remove caches and build outputs; .venv stays (delete it to start afresh)
	@rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	@find . -path ./$(VENV) -prune -o -path ./.git -prune -o -name __pycache__ -type d -exec rm -rf {} +

# The environment. The stamp holds the checkout's path: an environment that was copied or moved
# still points at the old source, so it is set up again instead of silently testing the wrong tree.
ifneq ($(shell cat $(READY) 2>/dev/null),$(CURDIR))
$(READY): always
endif

# 1 a usable interpreter  2 the pinned build backend  3 the package with its pinned dependencies
# No build isolation: an isolated build would fetch its backend unpinned.
$(READY): pyproject.toml constraints.txt
	@rm -f $@
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("$(PYTHON) is Python %d.%d, Onefold needs 3.10 or later; use: make PYTHON=/path/to/python3" % sys.version_info[:2])'
	@{ $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 10))' && $(BIN)/python -m pip --version; } >/dev/null 2>&1 \
		|| { echo "creating $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	@echo "installing pinned dependencies into $(VENV)"
	@$(PIP) install -c constraints.txt hatchling editables
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[cli,report,test]'
	@printf '%s\n' '$(CURDIR)' > $@
