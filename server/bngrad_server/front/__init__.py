"""Computing for a CPU in the front process, in the thread in which a request has arrived.

The price is isolation: a bug in a kernel that crashes a worker would crash the front process. What keeps that unlikely:
only validated requests come here, in memory that no client can take away, with code that is tested for random shapes.
"""
