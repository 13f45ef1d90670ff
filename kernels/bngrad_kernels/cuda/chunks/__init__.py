"""Chunks: pieces of problems that are on the device together, their memory and copies."""
