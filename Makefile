# The project's commands; `make` alone lists them. Each first makes .venv where it is missing or out of date.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-long lint docs clean

PYTHON ?= $(shell for each in python3.11 python3; do \
	"$$each" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo "$$each" && break; done)
TORCH := $(shell sed -n 's/^torch==//p' tests/requirements.txt)
CPU_INDEX := https://download.pytorch.org/whl/cpu

# What is installed follows from these files, and from where this clone is: it is installed as it stands here.
INPUTS := Makefile pyproject.toml tests/requirements.txt tests/harness/pyproject.toml $(wildcard tests/harness/*.pth)
STAMP := .venv/.installed-$(shell { pwd -P; cat $(INPUTS); } | sha256sum | cut -c1-16)
PIP := .venv/bin/python -m pip --disable-pip-version-check
# One thread, also because one and two give different bits. Each test says itself what is set of the plugin's.
HYGIENE := unset $${!OMNI_DIFFUSION_SESSION_STATE_MANAGER@}; \
	export OMP_NUM_THREADS=1 VLLM_LOGGING_LEVEL=WARNING HF_HUB_OFFLINE=1
# Tests write checkpoints: into memory where there is such a place.
SCRATCH := scratch=$$(mktemp -d -p "$$([ -w /dev/shm ] && echo /dev/shm || echo "$${TMPDIR:-/tmp}")" session-state-XXXXXX); \
	trap 'rm -rf "$$scratch"' EXIT
# Two at a time: a test of the host needs one core and about 2 GB.
WORKERS ?= 2
PYTEST := .venv/bin/python -m pytest -q -n $(WORKERS) --dist loadfile --durations=10 --basetemp="$$scratch/tests"

help:
	@echo 'vllm-omni-session-state: what you can do here'
	@echo
	@echo '  make demo       serve a tiny DreamZero and Cosmos3, flag off and on: is all equal? (3 minutes)'
	@echo '  make test       run the tests on the real vLLM-Omni (at most 15 minutes)'
	@echo '  make test-long  the same with twenty times the examples and steps (about an hour)'
	@echo '  make lint       ruff and mypy'
	@echo '  make docs       build the documentation into site/, strictly'
	@echo '  make clean      remove what tests and builds left behind; .venv stays'
	@echo
	@echo 'The first of them installs what it needs into .venv: about 3 minutes and 4.4 GB, once.'
	@echo 'It takes Python 3.11 and no GPU. Another interpreter: make demo PYTHON=/path/to/python3.11'

demo: $(STAMP)
	@.venv/bin/python -m omni_tiny.demo

test: $(STAMP)
	@$(HYGIENE); $(SCRATCH)
	echo 'Running the tests on the real vLLM-Omni, at most 15 minutes.'
	timeout --foreground --signal=INT --kill-after=1m 40m $(PYTEST) || {
	    status=$$?
	    case $$status in 124|137) echo 'The tests were stopped after 40 minutes: one of them hangs.' >&2;; esac
	    exit $$status
	}

test-long: $(STAMP)
	@$(HYGIENE); $(SCRATCH)
	echo 'Running the tests on the real vLLM-Omni at full counts, about an hour.'
	SESSION_STATE_LONG=1 $(PYTEST)

lint: $(STAMP)
	@.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet
	echo 'The documentation: site/index.html'

clean:
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name .venv -prune -o -name __pycache__ -prune -exec rm -rf {} +

$(STAMP):
	@python='$(PYTHON)'
	if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
	    [ -n "$$python" ] || { echo 'There is no Python 3.10 or newer here. Install Python 3.11, or name one:' \
	        'make demo PYTHON=/path/to/python3.11' >&2; exit 1; }
	    "$$python" -m venv .venv
	fi
	version=$$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
	echo "Installing into .venv (Python $$version): about 3 minutes and 4.4 GB, once."
	[ "$$version" = 3.11 ] || echo "  Mind: vLLM's CPU wheel is for Python 3.11 and may not be found for $$version;" \
	    "if so, remove .venv and say make demo PYTHON=/path/to/python3.11"
	rm -f .venv/.installed-*
	echo '  1/3 PyTorch for the CPU'
	$(PIP) install -qq 'torch==$(TORCH)+cpu' 2>/dev/null || $(PIP) install -qq 'torch==$(TORCH)' --index-url $(CPU_INDEX)
	echo '  2/3 vLLM, vLLM-Omni, test tools (the longest, about 2 minutes)'
	$(PIP) install -qq -r tests/requirements.txt
	echo '  3/3 this plugin and its test harness'
	$(PIP) install -qq --no-deps -e . -e tests/harness
	touch $@
	echo 'Installed.'
	echo

.ONESHELL:
