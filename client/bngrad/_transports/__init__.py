"""The transports of a call: shared memory, HTTP/2 on sockets of our own, grpcio."""
