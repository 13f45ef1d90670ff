"""The HTTP/2 port: from a connection's first byte to its calls."""
