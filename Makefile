# The daily commands. `make help` lists them.

MODEL  ?= lane-small
# One rank where one is asked for by its engine; else as many as measure a scaling factor on the smallest machine.
RANKS  ?= $(if $(filter solo,$(ENGINE)),1,2)
ENGINE ?=
DATA   ?=
OUT    ?=
ARGS   ?=

VENV_PYTHON := .venv/bin/python
# The first Python that is new enough and answers (a version manager's shim may not).
FIND_PYTHON = for python in $(PYTHON) python3.11 python3.12 python3.13 python3; do \
	"$$python" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$$python"; break; }; done
SETUP = @python=$$($(FIND_PYTHON)); [ -n "$$python" ] || { \
	echo 'set-up: no Python 3.11 or newer with venv found: install one (Debian, Ubuntu: apt-get install python3 python3-venv), or name yours: PYTHON=/path/to/python3' >&2; exit 2; }; \
	"$$python" tools/setup_environment.py --engine "$(ENGINE)"

.PHONY: help setup train test test-services test-all check doctor nightly images clean

help:
	@echo 'make train   train a model: MODEL=lane-small RANKS=2 [DATA=FOLDER] [ENGINE=horovod|torch|solo] [OUT=FOLDER] [ARGS="--set optim.lr=3e-4"]'
	@echo 'make nightly run a night of jobs, then its morning report: PLAN=sweeps/plans/nightly.toml'
	@echo 'make images  build the container images; with REGISTRY=host:port/org push and pin them too'
	@echo 'make test    run the tests; make test-services: with real Slurm, container engine, registry, data base and browser;'
	@echo '             make test-all: every engine and number of ranks for each failure too'
	@echo 'make check   ruff, mypy, import-linter and the fast tests'
	@echo 'make doctor  say what this machine has, and what is missing'
	@echo 'make setup   make .venv ready (every target above but doctor does it by itself)'
	@echo 'make clean   remove .venv and what was built (the cache of wheels stays)'
	@echo
	@echo 'ENGINE=torch needs no compiler. TORCH_INDEX=URL [TORCH_VERSION=2.13.0] take another build of torch, e.g. for your CUDA.'

setup:
	$(SETUP)

train:
	$(SETUP)
	@$(VENV_PYTHON) -m pipelines train $(MODEL) --ranks $(RANKS) $(if $(filter-out 1,$(RANKS)),--measure-scaling) \
		$(if $(DATA),--data "$(DATA)") $(if $(ENGINE),--engine $(ENGINE)) $(if $(OUT),--out "$(OUT)") $(ARGS)

test:
	$(SETUP)
	@$(VENV_PYTHON) -m pytest -n 2 --dist loadgroup -m 'not exhaustive and not services' $(ARGS)

# What is tested against a real cluster, engine, registry, data base or browser; skips those that are not installed.
test-services:
	$(SETUP)
	@$(VENV_PYTHON) -m pytest -m 'services and not exhaustive' $(ARGS)

# Every engine and number of ranks for every failure: over an hour on two cores.
test-all:
	$(SETUP)
	@$(VENV_PYTHON) -m pytest $(ARGS)

# mypy beside the tests, which wait now and then.
check:
	$(SETUP)
	@$(VENV_PYTHON) -m ruff check .
	@.venv/bin/lint-imports
	@$(VENV_PYTHON) -m mypy & typed=$$!; \
	$(VENV_PYTHON) -m pytest -q -n 2 -m 'not slow and not services' $(ARGS); tested=$$?; \
	wait $$typed && exit $$tested

PLAN   ?= sweeps/plans/nightly.toml

nightly:
	$(SETUP)
	@$(VENV_PYTHON) -m sweeps nightly $(PLAN) $(ARGS)

REGISTRY ?=

images:
	$(SETUP)
	@$(VENV_PYTHON) -m containers build all $(if $(REGISTRY),--registry "$(REGISTRY)" --push) $(ARGS)

# Answers without any set-up too, to say what is missing.
doctor:
	@python=$(VENV_PYTHON); [ -x "$$python" ] || python=$$($(FIND_PYTHON)); "$${python:-python3}" -m pipelines doctor $(ARGS)

clean:
	rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
