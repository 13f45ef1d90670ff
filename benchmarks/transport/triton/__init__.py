"""Triton Inference Server with the kernel as a model of its Python backend; ``make bench-triton`` installs it."""

MODEL = "batch_norm_grad"
INPUTS = ("y_backprop", "x", "scale", "reserve_space_1", "reserve_space_2")
OUTPUTS = ("x_backprop", "scale_backprop", "offset_backprop")
THREADS = "BNGRAD_BENCHMARK_THREADS"
"""The environment variable that tells the model the number of threads of its kernel."""
