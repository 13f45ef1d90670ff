"""Text to print."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""Writes each character that cannot be printed as an escape such as ``\n`` or ``\x1b``.

    So text from another process can neither begin a line of a log or screen, nor control the terminal that shows it.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def counted(number: int, noun: str) -> str:
    """Returns a number and what it counts, such as "1 device" or "2 devices"."""
    return f"{number} {noun}{'s' * (number != 1)}"
