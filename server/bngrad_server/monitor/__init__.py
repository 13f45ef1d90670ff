"""What operators look at: metrics, health and a page, over HTTP, served by a process of its own.

Whatever is done to its port, the server does not notice: all that the process asks of it is its status, a few times a
second at most.
"""
