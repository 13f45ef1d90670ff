"""Which request is computed next, in which batch, by which worker."""
