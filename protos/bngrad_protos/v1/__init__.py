"""Generated code of proto package ``bngrad.v1``; ``make proto`` writes it."""
