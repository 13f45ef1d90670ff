"""The protocol: proto package ``bngrad.v1`` and the code generated from it."""
