"""A model of many servers and ten times as many clients, and a real run of four servers to check it against."""
