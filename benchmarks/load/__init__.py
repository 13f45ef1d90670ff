"""The parts of ``benchmarks.bench_load``."""
