"""Metrics, health and a dashboard over HTTP, served by a process of their own.

Requests to its port do not disturb the server: the process only asks it for its status, a few times a second at most.
"""
