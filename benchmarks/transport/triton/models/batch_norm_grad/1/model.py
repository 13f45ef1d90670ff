"""The model's code, at the path where Triton looks for it."""

from benchmarks.transport.triton.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
