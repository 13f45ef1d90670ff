"""Tensors that are sent ahead of the calls that need them."""
