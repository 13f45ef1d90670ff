"""How gRPC calls arrive and are answered: two ports, one servicer."""
