"""The socket under a connection: buffered, encrypted or not, and with or without copies."""
