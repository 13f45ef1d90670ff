PYTHON ?= python3
VENV := .venv
# For machines with a GPU, on which nothing is installed; docs/cuda.md says what has to be there.
GPU_PYTHON ?= python3
GPU_DEVICE ?= cuda:0
GPU_PYTEST = BNGRAD_TEST_DEVICE=$(GPU_DEVICE) PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(GPU_PYTHON) -m pytest \
	-c tests/gpu/pytest.ini --rootdir $(CURDIR)
BIN := $(VENV)/bin
LOCK := $(BIN)/uv pip compile --quiet --universal --python-version 3.10 --no-header --no-annotate --upgrade
HASHES := --generate-hashes --constraint requirements/dev.txt

.PHONY: demo test soak lint docs proto settings-page lock audit image-test bench bench-transport bench-load bench-hostile \
	gpu-test gpu-test-kernels gpu-test-sanitizer gpu-test-server gpu-bench gpu-sweep gpu-simulate clean

demo: $(VENV)/server.stamp  ## Sets up, starts a CPU server and sends it real gradients
	$(BIN)/bngrad demo

test: $(VENV)/dev.stamp  ## Sets up and runs every test; many wait rather than compute, so two files at a time
	$(BIN)/pytest --numprocesses 2 --dist loadfile

soak: $(VENV)/dev.stamp  ## Ten minutes of random faults under load; make soak MINUTES=60 for an hour
	$(BIN)/python -m tests.faults.soak --minutes $(or $(MINUTES),10)

lint: $(VENV)/dev.stamp  ## Style, types, layers and the protocol's lint rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd protos && ../$(BIN)/buf lint
	$(BIN)/hadolint docker/Dockerfile docker/Dockerfile.cuda
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir build/site

docs: $(VENV)/dev.stamp  ## The documentation as a site, on http://127.0.0.1:8000
	$(BIN)/mkdocs serve

lock: $(VENV)/dev.stamp  ## Takes newer versions of all dependencies into requirements/
	$(LOCK) --extra dev --output-file requirements/dev.txt pyproject.toml
	$(LOCK) --extra server --extra otel $(HASHES) --output-file requirements/server.txt pyproject.toml
	$(LOCK) --extra cuda12 --extra otel $(HASHES) --output-file requirements/cuda12.txt pyproject.toml
	$(LOCK) $(HASHES) --output-file requirements/build.txt requirements/build.in

audit: $(VENV)/dev.stamp  ## Asks a database on the network whether any locked version has known weaknesses
	for lock in requirements/*.txt; do $(BIN)/pip-audit --strict --disable-pip --no-deps --requirement $$lock || exit 1; done

ENGINE ?= podman
image-test: $(VENV)/dev.stamp  ## Builds the images with buildah, runs the CPU one as it should be run, and beside Prometheus
	$(BIN)/python -m tests.deploy.image --engine $(ENGINE)
	$(BIN)/python -m tests.deploy.stack --engine $(ENGINE)

proto: $(VENV)/dev.stamp  ## Regenerates the code beside the .proto files
	$(BIN)/python -m grpc_tools.protoc -I protos --python_out=protos --pyi_out=protos --grpc_python_out=protos \
		--plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc --mypy_grpc_out=protos \
		protos/bngrad_protos/v1/*.proto

settings-page: $(VENV)/dev.stamp  ## Writes the table of docs/settings.md from the model of the settings
	$(BIN)/python -m tests.unit.cli.settings_page

bench: $(VENV)/dev.stamp  ## CPU kernels against TensorFlow, PyTorch and oneDNN
	$(BIN)/python -m benchmarks.bench_kernels
	$(BIN)/python -m benchmarks.bench_second_order

bench-transport: $(VENV)/dev.stamp  ## Round trips against plain protobuf, bare gRPC, Arrow Flight and the kernel
	$(BIN)/python -m benchmarks.bench_transport

bench-load: $(VENV)/dev.stamp  ## Goodput and latency up to and past saturation, a storm, killed workers, batching
	$(BIN)/python -m benchmarks.bench_load $(LOAD)

bench-hostile: $(VENV)/dev.stamp  ## What bad clients of all kinds cost a well-behaved one
	$(BIN)/python -m benchmarks.bench_hostile --json benchmarks/results/hostile.json

# What else is on the path stays there: a machine with a GPU may have its packages in a folder of their own.
gpu-test-kernels gpu-test-sanitizer gpu-test-server gpu-bench gpu-sweep: export PYTHONPATH := \
	$(CURDIR)/cli:$(CURDIR)/client:$(CURDIR)/server:$(CURDIR)/kernels:$(CURDIR)/wire:$(CURDIR)/protos:$(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

gpu-test: gpu-test-kernels gpu-test-sanitizer gpu-test-server  ## On a machine with a GPU: all of the next three

gpu-test-kernels:  ## There: the kernels' tests on it, its bits against a CPU's, a hundred runs
	$(GPU_PYTHON) -c "import cupy, ml_dtypes, numpy, pytest"
	$(GPU_PYTEST) tests/gpu/test_gpu.py tests/kernels/test_accuracy.py tests/kernels/test_bits.py \
		tests/kernels/cuda/test_kernels.py

gpu-test-sanitizer:  ## There: a little of everything under compute-sanitizer's memcheck, racecheck and synccheck
	$(GPU_PYTEST) tests/gpu/test_sanitizer.py

gpu-test-server:  ## There: the ops, over every transport, through a server whose worker has the GPU
	$(GPU_PYTHON) -c "import click, cupy, google.rpc.error_details_pb2, grpc_channelz, grpc_health, grpc_reflection, \
		grpc_status, h11, hpack, prometheus_client, psutil, pydantic_settings, pytest_asyncio, rich; \
		import bngrad_protos.v1.batch_norm_grad_pb2_grpc"
	BNGRAD_TEST_DEVICE=$(GPU_DEVICE) PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(GPU_PYTHON) -m pytest -p pytest_asyncio.plugin \
		-ra -W default --durations=15 -o faulthandler_timeout=180 \
		tests/gpu/test_server.py tests/integration/test_ops.py tests/integration/test_transports.py \
		tests/integration/test_exchange.py tests/integration/test_bad_input.py \
		tests/integration/test_shared_memory.py tests/integration/test_second_order.py

gpu-bench:  ## There: kernels against PyTorch's and cuDNN's, and requests through a server; options in BENCH
	$(GPU_PYTHON) -m benchmarks.bench_gpu --ordinal $(GPU_DEVICE:cuda:%=%) $(BENCH)

gpu-sweep:  ## There: what the constants of the plan are worth on it
	$(GPU_PYTHON) -m benchmarks.gpu.sweep

gpu-simulate: $(VENV)/dev.stamp  ## Without a GPU: the kernels' PTX on GPGPU-Sim, which docs/cuda.md says how to build
	@test -n "$(SIMULATOR)" || { echo "SIMULATOR=FOLDER has to say where GPGPU-Sim was built, see docs/cuda.md" >&2; exit 2; }
	BNGRAD_SIMULATOR=$(SIMULATOR) $(BIN)/python -m pytest -c tests/gpu/pytest.ini --rootdir $(CURDIR) \
		-o faulthandler_timeout=1200 tests/gpu/test_simulated.py

clean:
	rm -rf $(VENV)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/server.stamp: pyproject.toml requirements/dev.txt | $(BIN)/python
	$(BIN)/pip install --quiet --constraint requirements/dev.txt --editable '.[server]'
	touch $@

$(VENV)/dev.stamp: pyproject.toml requirements/dev.txt | $(BIN)/python
	$(BIN)/pip install --quiet --constraint requirements/dev.txt --editable '.[dev]'
	touch $@ $(VENV)/server.stamp
