"""The second order on the CPU, in the same tiles and groups as the first order."""
