"""Connections of the HTTP/2 port until their first call."""
