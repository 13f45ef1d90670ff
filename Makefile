PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint proto bench bench-transport clean

demo: $(VENV)/server.stamp  ## Sets up, starts a CPU server and sends it real gradients
	$(BIN)/bngrad demo

test: $(VENV)/dev.stamp  ## Sets up and runs every test
	$(BIN)/pytest

lint: $(VENV)/dev.stamp  ## Style, types, layers and the protocol's lint rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd protos && ../$(BIN)/buf lint

proto: $(VENV)/dev.stamp  ## Regenerates the code beside the .proto files
	$(BIN)/python -m grpc_tools.protoc -I protos --python_out=protos --pyi_out=protos --grpc_python_out=protos \
		--plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc --mypy_grpc_out=protos \
		protos/bngrad_protos/v1/*.proto

bench: $(VENV)/dev.stamp  ## CPU kernels against TensorFlow, PyTorch and oneDNN
	$(BIN)/python -m benchmarks.bench_kernels

bench-transport: $(VENV)/dev.stamp  ## Round trips against plain protobuf, bare gRPC, Arrow Flight and the kernel
	$(BIN)/python -m benchmarks.bench_transport

clean:
	rm -rf $(VENV)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/server.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --editable '.[server]'
	touch $@

$(VENV)/dev.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@ $(VENV)/server.stamp
