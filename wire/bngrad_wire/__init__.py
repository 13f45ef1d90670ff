"""The wire formats and transports that client and server share."""

import sys

__version__ = "0.1.0"

if sys.platform != "linux":
    raise ImportError(
        f"bngrad needs Linux, not {sys.platform}; from there, call its servers as examples/stock_python_client.py does"
    )
