"""The second order on the CPU: what `bngrad_kernels.cpu` does for the first, on the same tiles and groups."""
