"""Memory shared with a server on this host."""
