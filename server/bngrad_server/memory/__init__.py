"""Shared memory: the arena of requests in flight, and regions leased to clients on this host."""
