"""The client for asyncio."""

from __future__ import annotations

from bngrad._async_client import Client

__all__ = ["Client"]
