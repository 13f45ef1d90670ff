"""The server end of a connection, and its calls."""
