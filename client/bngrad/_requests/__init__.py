"""Arguments of an op to request messages, and response messages to results."""
