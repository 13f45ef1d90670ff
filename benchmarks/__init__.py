"""A package, so that another one of this name among those installed is not taken for it."""
