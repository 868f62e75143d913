# Everything a contributor runs. Each target creates the environment it needs.
#   make venv      .venv with torch (the CPU build) and everything for development
#   make demo      a training run through planned faults without a rollback, and its report
#   make check     format, lint, types, import order, the documentation and its examples
#   make test      the tests, without the slowest
#   make test-all  all tests: ten thousand schedules, soaks, every kill point, quick benchmarks
#   make test-hosts  jobs on several hosts, in network namespaces, that lose some of them
#   make test-ports  scripts for Hugging Face's Trainer, Lightning, Megatron and others, through faults
#   make test-ray  the tests that need Ray
#   make demo-hosts  three hosts on this machine: one leaves, and two die; or with BACKEND=etcd
#   make services  what some tests need (etcd, Slurm, cc, Chromium), by apt where this user is root
#   make campaign  1,000 faults in a training that must end with the same bits; takes about 40 minutes on two cores
#   make torture   crash states and failing calls of saves, histories of hosts, and generated training
#                  programs and states, for TORTURE_SECONDS, by SEED; ONLY=programs: these alone
#   make gpu       what needs a GPU, in nine minutes with one: tests, then measurements; PYTHON= has a
#                  CUDA build of torch, or TORCH=
#   make cuda-names  the names that are relied on, in a build of torch for CUDA: CUDA_TORCH=2.13.0
#   make bench     the benchmarks, compared with another library that restarts in place
#   make docs      the documentation, into build/site; its Python examples are type-checked
#   make dist      sdist and wheel, into dist/; the README's first program runs from the wheel
#   make format    formats the code, and applies the fixes of the linter
#   make clean     removes environments, builds and caches
#   make test TORCH=2.6.0  any of these with another torch: a version, or what pip takes, such as the
#                  path of a wheel. It has environments of its own, .venv-torch2.6.0 and so on

PYTHON ?= python3
# Installed first, at an exact version: a CPU build is enough for everything here, and plain
# `torch` may download gigabytes of CUDA packages. On a machine with GPUs: make TORCH=torch ...
DEFAULT_TORCH := torch==2.13.0
TORCH ?= $(DEFAULT_TORCH)
# A bare version is one of torch. Another torch than the default one has environments of its own.
TORCH_PACKAGE := $(if $(filter 0 1 2 3 4 5 6 7 8 9,$(firstword $(subst ., ,$(TORCH)))),torch==$(TORCH),$(TORCH))
TORCH_FOLDER := $(if $(filter $(DEFAULT_TORCH),$(TORCH_PACKAGE)),,-$(notdir $(subst ==,,$(TORCH_PACKAGE))))

# Compiled once: the tests start hundreds of processes, in some places with this variable set.
export PYTHONDONTWRITEBYTECODE :=

# The number of processes that run tests.
WORKERS ?= 3

VENV := .venv$(TORCH_FOLDER)
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH_VENV := .venv-bench$(TORCH_FOLDER)
BENCH_BIN := $(BENCH_VENV)/bin
BENCH_STAMP := $(BENCH_VENV)/.installed
FRAMEWORKS_VENV := .venv-frameworks$(TORCH_FOLDER)
FRAMEWORKS_STAMP := $(FRAMEWORKS_VENV)/.installed
BUILT_FROM := pyproject.toml

.DEFAULT_GOAL := help
.PHONY: help venv services demo demo-hosts test test-all test-slow test-hosts test-ray test-ports campaign torture gpu cuda-names check format bench docs dist clean

help:
	@sed -n 's/^#   //p' Makefile

# One rule for every environment: `$(call environment,FOLDER,EXTRAS)`.
define environment
$(PYTHON) -m venv $(1)
$(1)/bin/python -m pip install --quiet '$(TORCH_PACKAGE)'
$(1)/bin/python -m pip install --quiet '$(TORCH_PACKAGE)' --editable '.[$(2)]'
touch $@
endef

$(STAMP): $(BUILT_FROM)
	$(call environment,$(VENV),dev$(,)docs$(,)demo)

# Separate from .venv, so that the tests never see the other library. Its requirements are torch,
# psutil and small pure-Python packages: torch is already installed, so it installs no CUDA package.
# With NVRX=0.7.0 and PYTHON=python3.12 it has that version of nvidia-resiliency-ext, whose wheels are
# marked for glibc 2.39: its one native module needs 2.32. The other packages are all that it imports.
$(BENCH_STAMP): $(BUILT_FROM)
	$(call environment,$(BENCH_VENV),bench$(,)demo)
	$(if $(NVRX),$(call newer_nvrx,$(BENCH_VENV)/lib/python3.12/site-packages) || { rm $@; exit 1; })

define newer_nvrx
$(BENCH_BIN)/python -m pip install --quiet grpcio-tools httpx && \
	rm -rf $(1)/nvidia_resiliency_ext-*.dist-info && \
	$(BENCH_BIN)/python -m pip install --quiet --upgrade --no-deps --only-binary :all: \
		--platform manylinux_2_39_x86_64 --target $(1) nvidia-resiliency-ext==$(NVRX)
endef

# Separate, because Ray, Lightning and transformers are large.
$(FRAMEWORKS_STAMP): $(BUILT_FROM)
	$(call environment,$(FRAMEWORKS_VENV),dev$(,)deepspeed$(,)demo$(,)ports$(,)ray)

# The oldest wheel of Megatron-core with `megatron.training`, and the newest, each in a folder of its
# own. The tests need their Python files alone: no other package, and in a version for Python 3.12.
# The newest one needs Python 3.12 and triton, 300 MB: make test-ports PYTHON=python3.12 TRITON=triton
MEGATRON_VERSIONS := 0.17.0 0.19.2
MEGATRON_STAMP := $(FRAMEWORKS_VENV)/megatron/.installed
$(MEGATRON_STAMP): $(FRAMEWORKS_STAMP)
	$(foreach version,$(MEGATRON_VERSIONS),$(FRAMEWORKS_VENV)/bin/python -m pip install --quiet \
		--upgrade --no-deps --ignore-requires-python --only-binary :all: \
		--python-version 3.12 --platform manylinux_2_28_x86_64 --target $(@D)/$(version) megatron-core==$(version) &&) true
	$(if $(TRITON),$(FRAMEWORKS_VENV)/bin/python -m pip install --quiet --no-deps $(TRITON))
	touch $@

# A comma that `call` does not take for an argument separator.
, := ,

venv: $(STAMP)

demo: $(STAMP)
	rm -rf build/demo
	mkdir -p build/demo
	@echo 'Four ranks, without faults:'
	$(BIN)/outlast run --nproc-per-node 4 examples/digits.py --state build/demo/without
	@echo 'The same through an exception, a SIGKILL and a hang: the weights are the same, and no step is'
	@echo 'made twice, because after each fault at least one rank still has the newest step in memory:'
	$(BIN)/outlast run --nproc-per-node 4 --max-restarts 8 --chaos examples/digits_faults.json \
		--events-dir build/demo/events examples/digits.py --state build/demo/with
	$(BIN)/outlast report build/demo/events
	$(BIN)/outlast report build/demo/events --html build/demo/report.html

# Hosts are network namespaces: as root, or in a user namespace where that is allowed.
BACKEND ?= c10d
demo-hosts: $(STAMP)
	$(BIN)/python examples/hosts/demo.py build/demo-hosts --backend $(BACKEND)

# Tests wait more than they compute; multi-rank jobs use the remaining cores.
test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

services:
	.ci/services

# With AFTER_TEST=1, as in CI: without those that `make test` runs, without `exhaustive` ones, and with
# some of many cases. What mostly waits runs at the same time: the first tests and the installation of
# the last environments, then hosts and ports. A cluster of Ray has dozens of processes that import for
# a minute, so nothing runs beside it.
test-all: $(STAMP) services
	$(MAKE) --jobs 2 --output-sync=target test-slow $(MEGATRON_STAMP)
	$(MAKE) --jobs 2 --output-sync=target test-hosts test-ports
	$(MAKE) test-ray

test-slow: $(STAMP) services
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal --all --ignore tests/hosts \
		--ignore tests/ports $(if $(AFTER_TEST),-m 'slow and not exhaustive' --fewer-cases)

# Each test has several hosts, with several processes each, which renew their leases in time.
test-hosts: $(STAMP) services
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal --all tests/hosts \
		$(if $(AFTER_TEST),-m 'not exhaustive' --fewer-cases)

# The tests mostly wait for default timeouts, all at the same time.
test-ports: $(FRAMEWORKS_STAMP) $(MEGATRON_STAMP)
	$(FRAMEWORKS_VENV)/bin/python -m pytest --numprocesses 6 --all tests/ports tests/integrations \
		--ignore tests/integrations/test_parallel_3d.py --ignore tests/integrations/test_own_loaders.py \
		$(if $(AFTER_TEST),-m 'not exhaustive' --fewer-cases)

test-ray: $(FRAMEWORKS_STAMP)
	$(FRAMEWORKS_VENV)/bin/python -m pytest --all tests/elastic/states/test_ray.py tests/hosts/test_ray.py

# Hangs wait for their timeouts, and each killed process is replaced by one that imports torch.
campaign: $(STAMP)
	$(BIN)/outlast chaos campaign --faults 1000 --out build/campaign --markdown benchmarks/CAMPAIGN.md

# Each trial is a process; a failed one prints the command that runs it again. ONLY= chooses some.
TORTURE_SECONDS ?= 3600
torture: $(STAMP)
	mkdir -p build
	PYTHONPATH=tests $(BIN)/python -m torture --seconds $(TORTURE_SECONDS) --markdown build/torture.md \
		$(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only $(ONLY))

check: $(STAMP)
	$(BIN)/ruff format --no-cache --check .
	$(BIN)/ruff check --no-cache .
	$(BIN)/mypy
	$(BIN)/mypy --package benchmarks
	$(BIN)/lint-imports
	$(MAKE) docs

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# In an environment of its own with TORCH=; else with PYTHON=, or .venv, where nothing is installed:
# what is missing there can come from a folder of wheels, WHEELS=.
GPU_VENV := .venv-gpu
GPU_STAMP := $(GPU_VENV)/.installed
$(GPU_STAMP): $(BUILT_FROM)
	$(call environment,$(GPU_VENV),gpu)

ifeq ($(origin TORCH),command line)
GPU_PYTHON := $(GPU_VENV)/bin/python
gpu: $(GPU_STAMP)
else ifeq ($(origin PYTHON),command line)
GPU_PYTHON := $(PYTHON)
else
GPU_PYTHON := $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
endif

gpu:
	$(if $(WHEELS),$(GPU_PYTHON) -m pip install --quiet --no-index --no-deps --upgrade \
		--target build/gpu/site $(WHEELS)/*.whl)
	@PYTHONPATH=src:.:build/gpu/site:$$PYTHONPATH $(GPU_PYTHON) -m benchmarks.gpu

# Needs no GPU; downloads about 1 GB, and installs nothing.
CUDA_TORCH ?= 2.13.0
cuda-names: $(STAMP)
	rm -rf build/cuda
	$(BIN)/python tests/gpu/cuda_build.py $(CUDA_TORCH) build/cuda
	OUTLAST_TORCH_BUILD=$(CURDIR)/build/cuda $(BIN)/python -m pytest -s tests/gpu/test_names.py
	rm -rf build/cuda

bench: $(BENCH_STAMP)
	$(BENCH_BIN)/python -m benchmarks

docs: $(STAMP)
	$(BIN)/python tests/docs/check_examples.py
	$(BIN)/python tests/docs/check_names.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir build/site

# The wheel is built from the sdist, and installed where there is only torch.
dist: $(STAMP)
	rm -rf dist build/dist
	$(BIN)/python -m build --outdir dist
	$(PYTHON) -m venv build/dist
	build/dist/bin/python -m pip install --quiet '$(TORCH_PACKAGE)'
	build/dist/bin/python -m pip install --quiet '$(TORCH_PACKAGE)' dist/*.whl
	OUTLAST_DIST=dist OUTLAST_BIN=build/dist/bin $(BIN)/python -m pytest --all \
		tests/distribution tests/docs/test_readme.py

clean:
	rm -rf .venv $(wildcard .venv-*) build dist .pytest_cache .mypy_cache .ruff_cache \
		.import_linter_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + \
		2>/dev/null || true
