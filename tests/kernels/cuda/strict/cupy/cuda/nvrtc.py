"""The compiler, which makes a file that the stand-in loads."""

from __future__ import annotations


class NVRTCError(RuntimeError):
    """A source that does not compile."""


def getVersion() -> tuple[int, int]:  # noqa: N802 - CuPy's names
    return 12, 9


def getSupportedArchs() -> list[int]:  # noqa: N802
    return [70, 75, 80, 90, 100]


def createProgram(source: str, name: str, headers: tuple[str, ...], include_names: tuple[str, ...]) -> int:  # noqa: N802
    assert {type(source), type(name)} == {str}
    return 1


def compileProgram(program: int, options: tuple[str, ...]) -> None:  # noqa: N802
    assert type(options) is tuple
    assert all(type(option) is str for option in options)


def getCUBIN(program: int) -> bytes:  # noqa: N802
    return b"\x7fELF"


def getPTX(program: int) -> bytes:  # noqa: N802
    return b""


def getProgramLog(program: int) -> str:  # noqa: N802
    return ""


def destroyProgram(program: int) -> None:  # noqa: N802
    pass
