"""The columns kernel: sums down the columns of a matrix, see `bngrad_kernels.cpu.plan`."""
