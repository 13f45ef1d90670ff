"""The server: ports, admission, memory, batching and the pool of worker processes."""
