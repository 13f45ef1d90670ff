"""How gRPC calls arrive and are answered: one port, one servicer."""
