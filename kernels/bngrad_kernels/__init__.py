"""The op itself: its specification, a float64 reference, and the back ends that compute it. Knows no gRPC."""
