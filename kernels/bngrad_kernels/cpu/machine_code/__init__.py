"""The kernels' machine code: compiled by Numba in processes of their own, kept on disk, loaded without Numba."""
