"""Training steps of frameworks with and without bngrad."""
