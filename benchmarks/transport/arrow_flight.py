"""Arrow Flight, C++ gRPC: y_backprop and x as the float32 columns of record batches over a DoExchange stream.

A stream stays open and carries one request after another. NumPy and Arrow share their memory. A tensor that fits one
batch is used where gRPC received it; more batches are copied to their places as they arrive.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from benchmarks.transport import Call, Gradients, Prepare, certificates
from benchmarks.transport.kernel import Kernel
from pyarrow import flight

from bngrad_kernels.problem import Array, Problem
from bngrad_kernels.spec import FLOAT32, Spec

_REQUEST = pa.schema([("y_backprop", pa.float32()), ("x", pa.float32())])
_ANSWER = pa.schema([("x_backprop", pa.float32())])
_WHOLE_UP_TO = 1 << 21
_BATCH_ELEMENTS = 1 << 18
"""Of 64 KB to whole tensors, 1 MB batches were fastest; up to 8 MB, whole tensors were."""
_CLIENT_OPTIONS = [("grpc.http2.lookahead_bytes", 1 << 30)]
"""Frame size, write buffer, read chunks and BDP probes were tried too, and made nothing faster."""


class _Server(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types.
    def __init__(self, location: str, kernel: Kernel, **options: Any) -> None:
        super().__init__(location, **options)
        self._kernel = kernel

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Answers requests of one shape until the client closes the stream."""
        terms = json.loads(descriptor.command)
        spec = Spec(FLOAT32, tuple(terms["shape"]), 3)
        staging = [np.empty(spec.tensor_nbytes // 4, np.float32) for _ in range(2)]
        outputs = np.empty(spec.shape, np.float32), *np.empty((2, spec.channels), np.float32)
        writer.begin(_ANSWER)
        with contextlib.suppress(StopIteration):
            while True:
                (y_backprop, x), metadata = _receive(reader, staging)
                if terms["compute"]:
                    stats = np.frombuffer(metadata, np.float32).reshape(3, -1)
                    inputs = y_backprop.reshape(spec.shape), x.reshape(spec.shape), *stats
                    answer = self._kernel.run(Problem(spec, *inputs, *outputs))
                    _send(writer, _ANSWER, [answer.x_backprop], answer[1:], terms["batch_elements"])
                else:
                    _send(writer, _ANSWER, [y_backprop], (), terms["batch_elements"])


def start(address: str, threads: int, device: str, *, encrypted: bool = False) -> tuple[str, object]:
    """Serves for as long as the second object lives; the first is the address that clients take."""
    if encrypted:
        pair = certificates.CERTIFICATE.read_bytes(), certificates.KEY.read_bytes()
        server = _Server(f"grpc+tls://{address}", Kernel(threads, device), tls_certificates=[pair])
        return f"grpc+tls://127.0.0.1:{server.port}", server
    unix = address.startswith("unix:")
    location = "grpc+unix://" + address.removeprefix("unix:") if unix else f"grpc://{address}"
    server = _Server(location, Kernel(threads, device))
    return location if unix else f"grpc://127.0.0.1:{server.port}", server


@contextlib.contextmanager
def connect(target: str, *, compute: bool = True, encrypted: bool = False) -> Iterator[Prepare]:
    authorities = certificates.CA.read_bytes() if encrypted else None
    with flight.FlightClient(target, tls_root_certs=authorities, generic_options=_CLIENT_OPTIONS) as client:

        @contextlib.contextmanager
        def prepare(problem: Problem) -> Iterator[Call]:
            batch_elements = _WHOLE_UP_TO if problem.x.size <= _WHOLE_UP_TO else _BATCH_ELEMENTS
            terms = {"shape": problem.spec.shape, "compute": compute, "batch_elements": batch_elements}
            writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(json.dumps(terms)))
            with writer:
                writer.begin(_REQUEST)
                yield lambda: _call(writer, reader, problem, batch_elements)
                writer.done_writing()

        yield prepare


def _call(writer: Any, reader: Any, problem: Problem, batch_elements: int) -> Gradients | None:
    assert problem.scale is not None
    stats = problem.scale, problem.reserve_space_1, problem.reserve_space_2
    _send(writer, _REQUEST, [problem.y_backprop, problem.x], stats, batch_elements)
    (x_backprop,), metadata = _receive(reader, [np.empty(problem.x.size, np.float32)])
    if metadata is None:  # An echo.
        return None
    scale_backprop, offset_backprop = np.frombuffer(metadata, np.float32).reshape(2, -1)
    return Gradients(x_backprop.reshape(problem.spec.shape), scale_backprop, offset_backprop)


def _send(writer: Any, schema: Any, tensors: list[Array], vectors: tuple[Array, ...], batch_elements: int) -> None:
    """Sends tensors in batches, and the vectors with the first of them."""
    whole = pa.RecordBatch.from_arrays([pa.array(tensor.reshape(-1)) for tensor in tensors], schema=schema)
    metadata = b"".join(vector.tobytes() for vector in vectors)
    writer.write_with_metadata(whole.slice(0, batch_elements), metadata)
    for start in range(batch_elements, whole.num_rows, batch_elements):
        writer.write_batch(whole.slice(start, batch_elements))


def _receive(reader: Any, staging: list[Array]) -> tuple[list[Array], Any]:
    """Receives what `_send` sent: tensors of the staging's size, copied there unless they came in one batch."""
    chunk = reader.read_chunk()
    metadata = chunk.app_metadata
    received, elements = chunk.data.num_rows, staging[0].size
    if received == elements:
        return [column.to_numpy() for column in chunk.data.columns], metadata
    _place(chunk.data, staging, 0)
    while received < elements:
        batch = reader.read_chunk().data
        _place(batch, staging, received)
        received += batch.num_rows
    return staging, metadata


def _place(batch: Any, staging: list[Array], start: int) -> None:
    for column, tensor in zip(batch.columns, staging, strict=True):
        tensor[start : start + batch.num_rows] = column.to_numpy()
