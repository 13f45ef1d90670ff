"""Who may call, and how nobody else listens: tokens, certificates, TLS."""
