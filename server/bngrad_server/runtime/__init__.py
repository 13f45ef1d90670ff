"""What the server needs of the operating system: threads, processes, sockets, limits."""
