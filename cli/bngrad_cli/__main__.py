"""The entry point of ``bngrad`` and ``python -m bngrad_cli``."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

_MODULES = {
    "cli": ("rich",),
    "local": ("llvmlite", "numba"),
    "server": (
        "grpc_health", "grpc_reflection", "h11", "prometheus_client", "pydantic",
        "pydantic_settings",
    ),
}  # fmt: skip
"""The modules that a command may lack, by the extra that installs them."""
_UNWRITTEN = {errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC}
"""The errors of a file that takes no more, such as one on a full disk."""
_interrupted = threading.Event()


def main() -> None:
    """Runs the command line, or says which extra it lacks or why its output cannot be written."""
    _open_standard_files()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an encoding such as Latin-1 lacks marks and bars
    try:
        try:
            _run()
        finally:
            sys.stdout.flush()  # an error at the interpreter's exit would be printed as a traceback
    except OSError as error:
        if error.errno not in {errno.EPIPE, *_UNWRITTEN}:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what the exit writes
        sys.exit(1 if error.errno == errno.EPIPE else f"bngrad: cannot write the output: {error.strerror}")
    except ImportError as error:
        if _interrupted.is_set():
            sys.exit(128 + signal.SIGINT)
        missing = (error.name or "").partition(".")[0]
        extra = next((extra for extra, modules in _MODULES.items() if missing in modules), None)
        if extra is None or not isinstance(error, ModuleNotFoundError):
            raise
        install = f"pip install '.[{extra}]' in a checkout of bngrad"
        sys.exit(f"bngrad: this command needs the module {missing}: {install}")


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Does what Python does, and notes it: modules of Cython raise an ImportError where Ctrl-C comes amid theirs."""
    _interrupted.set()
    signal.default_int_handler(number, frame)


def _run() -> None:
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        handler = _interrupt
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C amid these imports would print a traceback
    from bngrad_cli.main import main as main_command  # noqa: PLC0415

    signal.signal(signal.SIGINT, handler)
    main_command(prog_name="bngrad")


def _open_standard_files() -> None:
    """Opens /dev/null for each that is closed: other files would take its descriptor, and child processes lack it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            file = Path(os.devnull).open(mode, errors="replace")  # noqa: SIM115 - stays open
            os.set_inheritable(file.fileno(), True)
            setattr(sys, name, file)


if __name__ == "__main__":
    main()
