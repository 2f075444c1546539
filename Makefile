# Everything a newcomer or CI needs. Each target installs what it uses into .venv by itself.
PYTHON ?= python3
BIN := .venv/bin
PACKAGE := .venv/package
TOOLS := .venv/tools

.PHONY: demo test fuzz smoke lint format clean

demo: $(PACKAGE)  ## the bundled model answers three questions, then four small models are trained and compared
	$(BIN)/freda demo

test: $(TOOLS)  ## format check, lint, then types beside the tests, which are two processes of one thread each
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy & types=$$!; \
	    OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder; \
	    tests=$$?; wait $$types && exit $$tests

FUZZ_SECONDS ?= 300
FUZZ_SEED ?= 0
fuzz: $(TOOLS)  ## mutated inputs of every kind, for FUZZ_SECONDS; what it finds is printed and can be run again
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED)

smoke: $(TOOLS)  ## the experiments of experiments/mini end to end, too small to learn anything: some minutes
	rm -rf runs/smoke
	for script in train compute ablations sweep; do \
	    FREDA=$(abspath $(BIN)/freda) experiments/mini/$$script.sh --smoke || exit 1; \
	done
	for claim in layouts parts scorer; do \
	    FREDA=$(abspath $(BIN)/freda) experiments/mini/claim.sh $$claim --smoke || exit 1; \
	done
	FREDA=$(abspath $(BIN)/freda) PYTHON=$(abspath $(BIN)/python) LIMIT=4 ASSETS=$(abspath runs/smoke/assets) \
	    experiments/mini/ship.sh --smoke

lint: $(TOOLS)  ## format check, lint and types alone
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(TOOLS)  ## rewrite the code in the house style, and the pages that are made from code and results
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python docs/write_config.py
	$(BIN)/python docs/write_numbers.py
	$(BIN)/python docs/draw_masks.py

# What is downloaded is what locks/ names, by version and hash; see docs/dependencies.md. torch alone is taken in the build
# that pip finds for this machine, at the version of the constraints file.
$(PACKAGE): pyproject.toml constraints.txt locks/package.txt
	@echo "Installing freda into .venv. Most of it is torch: 1 to 6 GB, a few minutes on a fast connection."
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --require-hashes --no-deps -r locks/package.txt
	$(BIN)/python -m pip install -c constraints.txt torch
	$(BIN)/python -m pip install --no-deps --no-build-isolation -e .
	@touch $@

$(TOOLS): $(PACKAGE) locks/dev.txt
	@echo "Installing the tools for tests, lint and figures: about 100 packages, a minute or two."
	$(BIN)/python -m pip install --require-hashes --no-deps -r locks/dev.txt
	@touch $@

clean:  ## remove what the targets made, except runs/
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis
