"""The server: transport, staging, batching and the pool of worker processes."""
