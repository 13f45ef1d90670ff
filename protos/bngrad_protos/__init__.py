"""The protocol of bngrad: proto package ``bngrad.v1`` with the generated code beside it."""

__version__ = "0.1.0"
