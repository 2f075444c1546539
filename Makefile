# Everything a newcomer or CI needs. Each target sets up .venv by itself.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: demo test smoke lint format clean

demo: $(INSTALLED)  ## train four small models and watch one refine its drafts
	$(BIN)/freda demo

test: lint  ## lint, types and tests, these in two processes of one thread each
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist loadfile

smoke: $(INSTALLED)  ## the experiments of experiments/mini from end to end, too small to learn anything: 2 to 3 minutes
	rm -rf runs/smoke
	for script in train compute ablations sweep; do \
	    FREDA=$(abspath $(BIN)/freda) experiments/mini/$$script.sh --smoke || exit 1; \
	done
	FREDA=$(abspath $(BIN)/freda) PYTHON=$(abspath $(BIN)/python) LIMIT=4 ASSETS=$(abspath runs/smoke/assets) \
	    experiments/mini/ship.sh --smoke

lint: $(INSTALLED)  ## what CI checks before the tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(INSTALLED)  ## rewrite the code in the house style, and the pages made from it
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python docs/write_config.py
	$(BIN)/python docs/draw_masks.py

# torch first and through the constraints file: unpinned, pip would take whatever is newest, with its CUDA packages.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(INSTALLED)

clean:  ## remove what the targets made, but not runs/
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis
