PYTHON ?= python3
VENV := .venv
# The targets for GPU machines install nothing; docs/cuda.md lists what they need.
GPU_PYTHON ?= python3
GPU_DEVICE ?= cuda:0
GPU_PYTEST = BNGRAD_TEST_DEVICE=$(GPU_DEVICE) PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(GPU_PYTHON) -m pytest \
	-c tests/gpu/pytest.ini --rootdir $(CURDIR)
GPU_SERVER_PYTEST = BNGRAD_TEST_DEVICE=$(GPU_DEVICE) PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(GPU_PYTHON) -m pytest \
	-p pytest_asyncio.plugin -ra -W default --durations=15 -o faulthandler_timeout=180 \
	-o faulthandler_exit_on_timeout=false
BIN := $(VENV)/bin
LOCK := $(BIN)/uv pip compile --quiet --universal --python-version 3.10 --no-header --no-annotate --upgrade
HASHES := --generate-hashes --constraint requirements/dev.txt

.PHONY: help demo test test-fast test-kernels cuda-architectures test-ray soak lint docs dist proto settings-page kernels-page transport-page lock audit image-test fleet-test bench bench-transport bench-tls bench-triton bench-load bench-hostile \
	gpu-test gpu-test-kernels gpu-test-sanitizer gpu-test-server gpu-test-torch gpu-bench gpu-sweep clean

help:  ## Lists the targets
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand --tabs=22

demo: $(VENV)/server.stamp  ## Starts a CPU server and sends it real gradients
	$(BIN)/bngrad demo

# Tests start hundreds of Python processes, which would compile our modules anew where bytecode is not written.
test test-fast test-kernels: export PYTHONDONTWRITEBYTECODE :=

# First compiles the kernels: beside other tests, a server's compiler of the lowest priority would take minutes.
test: $(VENV)/dev.stamp  ## Runs every test, four files at a time, since many wait rather than compute
	$(BIN)/bngrad warm
	$(BIN)/pytest --numprocesses 4 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder

test-fast: $(VENV)/dev.stamp  ## Runs the unit tests of client, wire, protos, server and command line, without slow ones; 4 at a time, as they wait
	$(BIN)/pytest --numprocesses 4 --max-worker-restart 0 --dist worksteal -m "not slow" \
		$(addprefix tests/unit/,client wire protos server cli)

test-kernels: $(VENV)/dev.stamp  ## Runs the tests of the CPU and CUDA kernels; the latter are emulated on the CPU
	$(BIN)/pytest --numprocesses 2 --max-worker-restart 0 --dist loadfile tests/kernels

cuda-architectures: $(VENV)/dev.stamp  ## Compiles the CUDA kernels for every architecture, and notes that they passed
	rm -f tests/kernels/cuda/architectures.json
	$(BIN)/pytest -k "not as_they_are" tests/kernels/cuda/test_compiler.py
	$(BIN)/python -m tests.kernels.cuda.architectures

# Not in requirements/dev.txt: 79 MB, and a cluster takes longer to start than every run has for it.
RAY := ray==2.60.0

test-ray: $(VENV)/dev.stamp  ## Installs Ray, and tests servers on a Ray cluster on this machine
	$(BIN)/pip install --quiet --constraint requirements/dev.txt $(RAY)
	$(BIN)/pytest tests/ray

soak: $(VENV)/dev.stamp  ## Injects random faults and attacks under load for fifteen minutes, or MINUTES=60
	$(BIN)/python -m tests.faults.soak --attacks --minutes $(or $(MINUTES),15)

lint: $(VENV)/dev.stamp  ## Checks style, types, imports between packages, the protocol, container files and docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd protos && ../$(BIN)/buf lint
	$(BIN)/hadolint docker/Dockerfile docker/Dockerfile.cuda
	$(BIN)/zizmor --offline --quiet .github
	$(BIN)/python docs/site/build.py build --strict

docs: $(VENV)/dev.stamp  ## Serves the documentation on http://127.0.0.1:8000
	$(BIN)/python docs/site/build.py serve

dist: $(VENV)/dev.stamp  ## Builds and checks the packages; installs the wheel in an empty environment and calls a server
	rm -rf dist build/sbom.cdx.json build/compiled
	mkdir -p build
	$(BIN)/python -m bngrad_kernels.cpu.machine_code.ship build/compiled
	BNGRAD_COMPILED_KERNELS=$(CURDIR)/build/compiled $(BIN)/uv build --quiet --build-constraints requirements/build.txt
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	$(BIN)/python -m tests.deploy.dist dist/*.whl
	$(BIN)/python -m tests.deploy.sbom build/sbom.cdx.json

lock: $(VENV)/dev.stamp  ## Upgrades the versions of all dependencies in requirements/
	$(LOCK) --extra dev --output-file requirements/dev.txt pyproject.toml
	$(LOCK) --extra server --extra otel $(HASHES) --output-file requirements/server.txt pyproject.toml
	$(LOCK) --extra cuda12 --extra otel $(HASHES) --output-file requirements/cuda12.txt pyproject.toml
	$(LOCK) $(HASHES) --output-file requirements/build.txt requirements/build.in

audit: $(VENV)/dev.stamp  ## Looks up known vulnerabilities of the locked versions, over the network
	for lock in requirements/*.txt; do $(BIN)/pip-audit --strict --disable-pip --no-deps --requirement $$lock || exit 1; done

ENGINE ?= podman
image-test: $(VENV)/dev.stamp  ## Builds the images with buildah, and runs the CPU image alone and with Prometheus
	$(BIN)/python -m tests.deploy.image --engine $(ENGINE)
	$(BIN)/python -m tests.deploy.stack --engine $(ENGINE)

fleet-test: $(VENV)/dev.stamp  ## Runs servers, DNS, Envoy and a client as hosts of their own: needs root and dnsmasq
	$(BIN)/python -m tests.deploy.fleet

proto: $(VENV)/dev.stamp  ## Generates the code beside the .proto files
	$(BIN)/python -m grpc_tools.protoc -I protos --python_out=protos --pyi_out=protos --grpc_python_out=protos \
		--plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc --mypy_grpc_out=protos \
		protos/bngrad_protos/v1/*.proto

settings-page: $(VENV)/dev.stamp  ## Generates the tables of docs/settings.md from the settings model
	$(BIN)/python -m tests.unit.cli.settings_page

kernels-page: $(VENV)/dev.stamp  ## Generates the tables of the kernels in docs/performance.md and docs/cuda.md from benchmarks/results/
	$(BIN)/python -m benchmarks.kernels.page
	$(BIN)/python -m benchmarks.gpu.page

transport-page: $(VENV)/dev.stamp  ## Generates the tables of the transports in docs/ from benchmarks/results/
	$(BIN)/python -m benchmarks.transport.page

bench: $(VENV)/dev.stamp  ## Compares the CPU kernels with TensorFlow, PyTorch and oneDNN
	$(BIN)/python -m benchmarks.bench_kernels $(if $(RESULTS),--json $(RESULTS))
	$(BIN)/python -m benchmarks.bench_second_order

bench-transport: $(VENV)/dev.stamp  ## Compares round trips with plain protobuf, bare gRPC, Arrow Flight and the kernel alone
	$(BIN)/python -m benchmarks.bench_transport $(TRANSPORT)

bench-tls: $(VENV)/dev.stamp  ## Measures what TLS costs, beside Arrow Flight
	$(BIN)/python -m benchmarks.bench_transport --networks tcp --contestants bngrad-stream bngrad-stream-tls \
		bngrad-unary bngrad-unary-tls flight flight-tls $(TRANSPORT)

# Not in requirements/dev.txt: 153 MB. The server has an environment of its own, since its Python backend needs NumPy 1.
TRITON_SERVER := nvidia-pytriton==0.7.0
TRITON_CLIENT := tritonclient==2.73.0 python-rapidjson==1.25

bench-triton: build/triton/stamp  ## Installs Triton Inference Server, and compares round trips with it
	$(BIN)/python -m benchmarks.bench_transport --networks tcp --contestants bngrad-auto bngrad-shared bngrad-stream \
		bngrad-unary triton triton-shared flight kernel $(TRANSPORT)

build/triton/stamp: $(VENV)/dev.stamp
	$(PYTHON) -m venv build/triton
	build/triton/bin/pip install --quiet --no-deps $(TRITON_SERVER) numpy==1.26.4
	build/triton/bin/pip install --quiet --no-deps --constraint requirements/dev.txt numba llvmlite ml_dtypes --editable .
	$(BIN)/pip install --quiet --no-deps $(TRITON_CLIENT)
	touch $@

bench-load: $(VENV)/dev.stamp  ## Measures goodput and latency below and above saturation, and with killed workers
	$(BIN)/python -m benchmarks.bench_load $(LOAD)

bench-hostile: $(VENV)/dev.stamp  ## Measures what attacks cost good clients at every door; HOSTILE="--attacks garbage" for some
	$(BIN)/python -m benchmarks.bench_hostile $(or $(HOSTILE),--json benchmarks/results/hostile.json --page docs/attacks.md)

# Keeps the rest of PYTHONPATH: a machine with a GPU may have its packages in a folder of their own.
gpu-test-kernels gpu-test-sanitizer gpu-test-server gpu-test-torch gpu-bench gpu-sweep: export PYTHONPATH := \
	$(CURDIR)/cli:$(CURDIR)/client:$(CURDIR)/server:$(CURDIR)/kernels:$(CURDIR)/wire:$(CURDIR)/protos:$(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

gpu-test: gpu-test-kernels gpu-test-sanitizer gpu-test-server gpu-test-torch  ## GPU machine: runs the next four

gpu-test-kernels:  ## GPU machine: tests the kernels, also against the CPU's bits
	$(GPU_PYTHON) -c "import cupy, ml_dtypes, numpy, pytest"
	$(GPU_PYTEST) tests/gpu/test_gpu.py tests/kernels/test_accuracy.py tests/kernels/test_bits.py \
		tests/kernels/cuda/test_kernels.py tests/kernels/cuda/test_ahead.py

gpu-test-sanitizer:  ## GPU machine: runs a small workload under compute-sanitizer
	$(GPU_PYTEST) tests/gpu/test_sanitizer.py

gpu-test-server:  ## GPU machine: tests every op over every transport through a server
	$(GPU_PYTHON) -c "import click, cupy, google.rpc.error_details_pb2, grpc_health, grpc_reflection, \
		grpc_status, h11, hpack, hypothesis, prometheus_client, psutil, pydantic_settings, pytest_asyncio, rich; \
		import bngrad_protos.v1.batch_norm_grad_pb2_grpc"
	$(GPU_SERVER_PYTEST) tests/gpu/test_server.py tests/integration/test_ops.py tests/integration/test_transports.py \
		tests/integration/test_exchange.py tests/integration/test_bad_input.py \
		tests/integration/test_shared_memory.py tests/integration/test_second_order.py

gpu-test-torch:  ## GPU machine: tests bngrad.torch with tensors on the GPU
	$(GPU_PYTHON) -c "import hypothesis, torch"
	$(GPU_SERVER_PYTEST) tests/gpu/test_torch.py

gpu-bench:  ## GPU machine: compares with PyTorch and cuDNN; options in BENCH
	$(GPU_PYTHON) -m benchmarks.bench_gpu --ordinal $(GPU_DEVICE:cuda:%=%) $(BENCH)

gpu-sweep:  ## GPU machine: measures alternatives to the plan's constants
	$(GPU_PYTHON) -m benchmarks.gpu.sweep

clean:  ## Deletes the virtual environment
	rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10))" || \
		{ echo "bngrad needs Python 3.10 or newer; PYTHON=$(PYTHON) is $$($(PYTHON) --version 2>&1)" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# pip compiles one file after the other, compileall on every core. Some files are templates, which do not compile; other
# packages' own tests are not run.
define install
	$(BIN)/pip install --quiet --no-compile --constraint requirements/dev.txt --editable '.[$(1)]'
	$(BIN)/python -m compileall -q -j 0 -x '/tests?/' $(VENV)/lib >/dev/null || true
endef

$(VENV)/server.stamp: pyproject.toml requirements/dev.txt | $(BIN)/python
	$(call install,server)
	touch $@

$(VENV)/dev.stamp: pyproject.toml requirements/dev.txt | $(BIN)/python
	$(call install,dev)
	touch $@ $(VENV)/server.stamp
