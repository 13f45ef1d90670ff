"""The ops: validation, a float64 reference, and the backends that compute them. Independent of gRPC."""
