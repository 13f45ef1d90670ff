"""Calls of connections that may have several at a time: each has a lane."""
