"""The server and the operating system: threads, processes, sockets, limits."""
