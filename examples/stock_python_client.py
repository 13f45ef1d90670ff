"""Calls FusedBatchNormGradV3 on random tensors with only gRPC and the generated code, as in any other language.

    python examples/stock_python_client.py localhost:50051          sends a small batch
    python examples/stock_python_client.py unix:PATH 2048           sends a batch of 2048 images
    python examples/stock_python_client.py localhost:50051 --bad    sends a scale of the wrong length

The result is compared with the formula in double precision.
"""

from __future__ import annotations

import sys
from typing import Any

import grpc
import numpy as np
from google.rpc import error_details_pb2, status_pb2

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_protos.v1 import batch_norm_grad_pb2_grpc as pb_grpc

CHANNELS = 16
EPSILON = np.float32(1e-3)
MAX_BATCH = 100_000


def main(*arguments: str) -> int:
    if "--help" in arguments:
        print(__doc__.strip())
        return 0
    bad = "--bad" in arguments
    words = [argument for argument in arguments if argument != "--bad"]
    batch = parse_batch(words[1]) if len(words) == 2 else 2
    if len(words) not in (1, 2) or words[0].startswith("-") or not batch:
        print(f"{__doc__}BATCH is a whole number from 1 to {MAX_BATCH}.", file=sys.stderr)
        return 2
    target, shape = words[0], (batch, 8, 8, CHANNELS)
    rng = np.random.default_rng(0)
    y_backprop, x = rng.uniform(-1, 1, (2, *shape)).astype(np.float32)
    scale = rng.uniform(0.5, 1.5, CHANNELS).astype(np.float32)
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))

    request = pb.FusedBatchNormGradV3Request(
        y_backprop=to_tensor(y_backprop),
        x=to_tensor(x),
        scale=to_tensor(scale[:-1] if bad else scale),
        reserve_space_1=to_tensor(mean),
        reserve_space_2=to_tensor(variance),
        epsilon=float(EPSILON),
    )
    unlimited = [("grpc.max_receive_message_length", -1)]  # the default is 4 MiB
    with grpc.insecure_channel(target, unlimited) as channel:
        try:
            response = pb_grpc.BatchNormGradServiceStub(channel).FusedBatchNormGradV3(request, timeout=30)
        except grpc.RpcError as error:
            print_error(error)
            return 1

    x_backprop, scale_backprop, offset_backprop = expected_gradients(y_backprop, x, scale, mean, variance)
    good = [
        matches("x_backprop", response.x_backprop, x_backprop, 2.4e-7),
        matches("scale_backprop", response.scale_backprop, scale_backprop, 1e-6),
        matches("offset_backprop", response.offset_backprop, offset_backprop, 1e-6),
    ]
    return 0 if all(good) else 1


def parse_batch(word: str) -> int:
    """Returns 0 for a word that is no batch."""
    batch = int(word) if word.isdecimal() and len(word) < 10 else 0
    return batch if batch <= MAX_BATCH else 0


def to_tensor(array: Any) -> pb.Tensor:
    return pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=array.shape, data=array.astype("<f4").tobytes())


def expected_gradients(*inputs: Any) -> tuple[Any, Any, Any]:
    dy, x, scale, mean, variance = (array.astype(np.float64) for array in inputs)
    m = x.size / CHANNELS
    rstd = 1 / np.sqrt(variance + EPSILON)
    xc = x - mean
    sum_dy, sum_dy_xc = dy.sum((0, 1, 2)), (dy * xc).sum((0, 1, 2))
    return scale * rstd * (dy - sum_dy / m - xc * rstd**2 * sum_dy_xc / m), rstd * sum_dy_xc, sum_dy


def matches(name: str, tensor: pb.Tensor, expected: Any, tolerance: float) -> bool:
    values = np.frombuffer(tensor.data, "<f4").reshape(tensor.shape)
    error = abs(values - expected).max() / abs(expected).max()
    print(f"{name} {values.shape}: largest error {error:.2e} of the largest value")
    return bool(error <= tolerance)


def print_error(error: Any) -> None:
    print(f"{error.code().name}: {error.details()}", file=sys.stderr)
    status, bad_request = status_pb2.Status(), error_details_pb2.BadRequest()
    status.ParseFromString(dict(error.trailing_metadata()).get("grpc-status-details-bin", b""))
    for detail in status.details:
        if detail.Unpack(bad_request):
            for violation in bad_request.field_violations:
                print(f"field {violation.field}: {violation.description}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
