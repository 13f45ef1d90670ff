"""The gradients in NumPy, with the bits of the compiled kernels: for the seconds in which these are not there yet."""
