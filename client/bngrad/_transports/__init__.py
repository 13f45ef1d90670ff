"""The transports of a call: shared memory, our own HTTP/2, grpcio."""
