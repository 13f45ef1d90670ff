"""The commands of ``bngrad``, each the function of the same name in its module."""
