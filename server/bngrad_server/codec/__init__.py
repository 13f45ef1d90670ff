"""Protocol messages to validated requests, and outputs to responses."""
