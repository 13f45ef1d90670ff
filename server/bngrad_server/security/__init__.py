"""Authentication and encryption: tokens, certificates, TLS."""
