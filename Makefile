# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` need Python and nothing else: the first call builds .venv.
#
# PYTHON  interpreter that the environment is built with; for test-gpu, the one that runs the tests
# VENV    where the environment is
# TORCH   what pip installs as torch: the pinned group, any requirement, or `base` for the torch that
#         PYTHON already has (a CUDA build, say); after a change, `make clean` first
# ARGS    further arguments of pytest or of the demo

PYTHON ?= python3
VENV ?= .venv
TORCH ?= --group torch
ARGS ?=

BACKENDS := $(patsubst %/pyproject.toml,%,$(sort $(wildcard backends/*/pyproject.toml)))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
empty :=
space := $(empty) $(empty)
SOURCES := $(subst $(space),:,$(CURDIR) $(CURDIR)/kernels $(addprefix $(CURDIR)/,$(BACKENDS)))

.PHONY: help demo test test-gpu lint bench install clean

help:
	@echo 'make demo      train a small model sharded over 4 ranks, compared with the unsharded run'
	@echo 'make test      all tests that need no GPU'
	@echo 'make test-gpu  the tests that need one, several ranks on it, with the torch of PYTHON (no .venv)'
	@echo 'make lint      ruff and mypy'
	@echo 'make bench     measure here, write build/bench/report/report.html'
	@echo 'make install   only build .venv; make clean removes it'

install: $(INSTALLED)

$(INSTALLED): pyproject.toml $(addsuffix /pyproject.toml,$(BACKENDS))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo '$(PYTHON) is older than Python 3.10'; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' \
		|| { echo '$(PYTHON) cannot make environments (Debian: install python3-venv)'; exit 1; }
	@echo 'building $(VENV) (torch is large: minutes the first time)'
	$(PYTHON) -m venv $(if $(filter base,$(TORCH)),--system-site-packages) $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1' 'setuptools>=70.1'
	@# setuptools warns at length about editable installs and about the only licence form that 64 knows
	PYTHONWARNINGS=ignore \
	$(BIN)/python -m pip install --quiet --no-build-isolation $(filter-out base,$(TORCH)) \
		--group test --group lint -e . $(addprefix -e ,$(BACKENDS))
	@touch $@

demo: $(INSTALLED)
	$(BIN)/cptransport demo $(ARGS)

# One thread per process: rank processes and threads would otherwise fight over the cores. Tests that
# mostly compute run beside those that mostly wait for each other, which come first.
PYTEST := CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(BIN)/python -m pytest \
	-m 'not gpu and not multigpu and not slow'
COMPUTING := $(addprefix tests/,bench demo engines integration integrations kernels layout_conversion \
	mixer_modes ops packaging planning)

test: $(INSTALLED)
ifeq ($(ARGS),)
	@mkdir -p build
	@nice -n 5 env $(PYTEST) $(COMPUTING) >build/test-computing.log 2>&1 & computing=$$!; \
	trap "kill $$computing 2>/dev/null" EXIT; trap 'exit 130' INT TERM; \
	env $(PYTEST) $(addprefix --ignore=,$(COMPUTING)); status=$$?; \
	wait $$computing || status=1; cat build/test-computing.log; exit $$status
else
	env $(PYTEST) $(ARGS)
endif

test-gpu:
	@$(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
		|| { echo 'the torch of $(PYTHON) sees no CUDA device'; exit 1; }
	PYTHONPATH=$(SOURCES)$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) tests/gpu/run_all.py \
		--group A,B --budget-s 3600 --out build/test-gpu $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check --output-format concise .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A row that failed fails the target, but not before the report shows it.
bench: $(INSTALLED)
	@status=0; \
	for case in boundary kda mamba2; do \
		$(BIN)/cptransport bench $$case --json build/bench/$$case.json $(ARGS) || status=1; \
	done; \
	$(BIN)/cptransport report build/bench/*.json --out build/bench/report || status=1; \
	exit $$status

clean:
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache
