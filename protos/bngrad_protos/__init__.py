"""The protocol of bngrad: proto package ``bngrad.v1`` and the code generated from it."""
