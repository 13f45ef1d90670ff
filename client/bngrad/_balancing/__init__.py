"""Choosing the server of each call, and repeating calls that failed."""
