"""What the connections of the HTTP/2 port may take: places, threads, and time."""
