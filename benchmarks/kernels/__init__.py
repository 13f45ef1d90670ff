"""The parts of ``benchmarks.bench_kernels``."""
