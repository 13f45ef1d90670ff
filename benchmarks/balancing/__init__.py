"""Servers of different speeds, and clients that share their calls among them."""
