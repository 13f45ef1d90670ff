"""The subcommands of ``bngrad``; each is the function of the same name in its module."""
