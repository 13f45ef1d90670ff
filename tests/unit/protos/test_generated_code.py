"""The .proto files and the code generated from them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROTOS = Path(__file__).parents[3] / "protos"
FOLDER = Path("bngrad_protos/v1")


def test_the_committed_code_is_what_the_pinned_generators_produce(tmp_path: Path) -> None:
    plugin = Path(sys.executable).with_name("protoc-gen-mypy_grpc")
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", "-I", PROTOS),
            *(f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python", "mypy_grpc")),
            f"--plugin=protoc-gen-mypy_grpc={plugin}",
            *sorted((PROTOS / FOLDER).glob("*.proto")),
        ],
        check=True,
    )
    generated = sorted(path.relative_to(tmp_path) for path in (tmp_path / FOLDER).iterdir())
    committed = sorted(path.relative_to(PROTOS) for path in (PROTOS / FOLDER).glob("*_pb2*"))
    assert generated == committed
    for path in generated:
        assert (tmp_path / path).read_bytes() == (PROTOS / path).read_bytes(), f"{path}: run `make proto`"


def test_the_protocol_passes_buf_lint() -> None:
    buf = Path(sys.executable).with_name("buf")
    subprocess.run([buf, "lint"], cwd=PROTOS, check=True)
