"""Chooses the server of each call, and repeats calls that failed."""
