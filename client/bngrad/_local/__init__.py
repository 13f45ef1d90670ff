"""Calls that the CPU kernels compute in this process: the target ``local:``, and ``fallback="local"``."""
