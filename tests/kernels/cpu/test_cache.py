"""The cache of compiled CPU kernels."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.kernels.cpu import fixed_bits

from bngrad_kernels import backends, compiled_code
from bngrad_kernels.cpu.machine_code import cache, loader, ship, warm
from bngrad_kernels.cpu.machine_code.kernels import FIRST, Kernel, host
from bngrad_kernels.errors import DeviceUnavailableError

QUICK = Kernel("float32", 2)
"""The kernel that is compiled soonest."""
_COMPILE_SOON = """
import sys, time
from pathlib import Path
from bngrad_kernels.cpu.machine_code import compiler
code = Path(sys.argv.pop(1)).read_bytes()
compiler._object_code = lambda name: code
time.sleep(0.2)
compiler.main()
"""


@pytest.fixture(scope="session")
def compiled() -> bytes:
    """The code of `QUICK`."""
    loader.load(QUICK)
    code = loader.compiled(QUICK, host())
    assert code is not None
    return code


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiled: bytes) -> list[str]:
    """The kernels whose compilers were started, which take 0.2 s, as they have the code of `QUICK` already."""
    kernels: list[str] = []
    (tmp_path / "code").write_bytes(compiled)

    def begin(kernel: Kernel, cpu: str, lock_fd: int) -> subprocess.Popen[bytes]:
        kernels.append(str(kernel))
        arguments = [str(tmp_path / "code"), str(kernel), str(loader.path(kernel, cpu))]
        command = [sys.executable, "-c", _COMPILE_SOON, *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    monkeypatch.setattr(loader, "_begin", begin)
    return kernels


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()


def test_they_are_kept_under_the_users_cache(tmp_path: Path) -> None:
    assert cache.folder().parent == tmp_path / "home" / "bngrad"


def image_brings_a_kernel(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts a kernel into the cache folder, makes that read-only, and returns it."""
    image = cache.folder()
    (image / "cpu").mkdir()
    compiled_code.write(image / "cpu" / "kernel.o", b"code")
    monkeypatch.setattr(compiled_code, "is_writable", lambda path: False)
    return image


def test_a_read_only_cache_of_an_image_is_copied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    image = image_brings_a_kernel(monkeypatch)
    for _ in range(2):  # as a second worker does
        assert cache.folder() == tmp_path / "tmp" / f"bngrad-{os.getuid()}" / image.name
    assert compiled_code.read(cache.folder() / "cpu" / "kernel.o") == b"code"


def test_a_copy_can_be_written_to_and_has_no_damaged_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    image = image_brings_a_kernel(monkeypatch)
    (image / "cpu" / "half.o").write_bytes(b"co")
    (image / "cpu").chmod(0o555)
    assert [file.name for file in (cache.folder() / "cpu").iterdir()] == ["kernel.o"]
    assert (cache.folder() / "cpu").stat().st_mode & 0o700 == 0o700


def test_of_two_workers_that_copy_at_once_one_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    image = image_brings_a_kernel(monkeypatch)
    mkdtemp = tempfile.mkdtemp

    def begin_late(dir: Path) -> str:  # noqa: A002
        shutil.copytree(image, dir / image.name)  # the other one's
        return mkdtemp(dir=dir)

    monkeypatch.setattr(tempfile, "mkdtemp", begin_late)
    assert compiled_code.read(cache.folder() / "cpu" / "kernel.o") == b"code"
    assert [path.name for path in cache.folder().parent.iterdir()] == [image.name]  # the draft is gone


def test_kernels_of_a_wheel_are_used_where_the_users_cache_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shipped = tmp_path / "wheel" / "cpu"
    shipped.mkdir(parents=True)
    monkeypatch.setattr(cache, "shipped", lambda: shipped.parent)
    compiled_code.write(shipped / f"{FIRST}.o", b"of the wheel")
    assert loader.is_compiled(FIRST, "cpu")
    assert loader.compiled(FIRST, "cpu") == b"of the wheel"
    assert not cache.home().exists()  # nothing is copied
    compiled_code.write(loader.path(FIRST, "cpu"), b"the user's")
    assert loader.compiled(FIRST, "cpu") == b"the user's"
    loader.path(FIRST, "cpu").write_bytes(b"damaged")
    assert loader.compiled(FIRST, "cpu") == b"of the wheel"
    (shipped / f"{FIRST}.o").write_bytes(b"damaged")
    assert not loader.is_compiled(FIRST, "cpu")


def test_what_is_compiled_for_a_wheel_is_loaded_without_compiling(
    begun: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in (ship, warm):
        monkeypatch.setattr(module, "KERNELS", (QUICK,))
    monkeypatch.setattr(ship, "SHIPPED_LEVELS", (host(),))
    ship.ship(tmp_path / "wheel")
    assert begun == ["float32-2"]
    monkeypatch.setattr(cache, "shipped", lambda: tmp_path / "wheel" / cache.sources())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another user"))
    monkeypatch.delattr(loader, "compile_once")
    assert loader.load(QUICK).alone_address
    assert warm.missing(host()) == []


def test_a_damaged_kernel_is_compiled_once_for_all_that_load_it_at_once(begun: list[str]) -> None:
    loader.path(QUICK, host()).touch()
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(loader.load, [QUICK, QUICK])
    assert begun == ["float32-2"]
    assert first.join_address != second.join_address


def as_another_user(path: str, flags: int) -> int:
    """Opens a file as who is not root and has no right to write to it."""
    if flags & os.O_ACCMODE != os.O_RDONLY and not Path(path).stat().st_mode & 0o222:
        raise PermissionError(path)
    return os.open(path, flags)


@pytest.mark.parametrize("made_by", ["this user", "another user"])
def test_of_processes_that_fill_the_cache_at_once_one_compiles_a_kernel(
    begun: list[str], monkeypatch: pytest.MonkeyPatch, made_by: str
) -> None:
    if made_by == "another user":
        loader.path(FIRST, "cpu").with_suffix(loader.LOCK).touch(0o444)
        # Root may write to any file, and tests may run as root.
        monkeypatch.setattr(Path, "open", lambda path, mode="r": open(path, mode, opener=as_another_user))  # noqa: SIM115
    with ThreadPoolExecutor(3) as threads:
        filled = list(threads.map(lambda _: list(warm.fill("cpu", [FIRST], jobs=1)), range(3)))
    assert filled == [[(FIRST, "")]] * 3
    assert begun == ["float32-1"]


def test_who_fills_the_cache_waits_for_no_compiler_of_the_lowest_priority(begun: list[str]) -> None:
    with loader.path(FIRST, "cpu").with_suffix(loader.BACKGROUND_LOCK).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert list(warm.fill("cpu", [FIRST], jobs=1)) == [(FIRST, "")]
    assert begun == ["float32-1"]


def test_a_compiler_ends_once_one_of_another_priority_has_compiled_the_kernel(
    monkeypatch: pytest.MonkeyPatch, compiled: bytes
) -> None:
    endless = [sys.executable, "-c", "import time; time.sleep(600)"]
    processes: list[subprocess.Popen[bytes]] = []

    def begin(*_: object) -> subprocess.Popen[bytes]:
        processes.append(subprocess.Popen(endless, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        compiled_code.write(loader.path(QUICK, host()), compiled)
        return processes[0]

    monkeypatch.setattr(loader, "_begin", begin)
    loader.compile_once(QUICK, host(), loader.BACKGROUND_LOCK)
    assert processes[0].returncode == -signal.SIGKILL


OTHER_LEVELS = {
    "x86_64": [("x86-64-v3", FIRST), ("x86-64-v2", Kernel("float16", 1))],
    "aarch64": [("generic", FIRST), ("generic", Kernel("float16", 1))],
}


@pytest.mark.parametrize(("cpu", "kernel"), OTHER_LEVELS.get(platform.machine(), []), ids=str)
def test_code_for_another_level_of_processors_has_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, cpu: str, kernel: Kernel
) -> None:
    monkeypatch.setenv("NUMBA_CPU_NAME", cpu)
    other = backends.create("cpu", threads=2)
    expected = fixed_bits.expected()
    numbers = [number for number in range(300) if fixed_bits.is_for(kernel, number)]
    assert [fixed_bits.digest(number, other) for number in numbers] == [expected[number] for number in numbers]
    assert loader.is_compiled(kernel, cpu)
    assert [level.name for level in cache.folder().iterdir()] == [cpu]


def test_what_the_user_has_set_for_python_and_numba_stops_no_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    loader.load(QUICK)
    assert loader.is_compiled(QUICK, host())


def test_a_kernel_that_cannot_be_compiled_is_an_error_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CPU_NAME", "x86-64-v99")
    with pytest.raises(DeviceUnavailableError, match="the kernel float32-1 could not be compiled: LLVM"):
        backends.create("cpu").warm_up()


def test_a_kernel_that_the_cache_cannot_keep_is_used(caplog: pytest.LogCaptureFixture) -> None:
    loader.path(QUICK, host()).mkdir()  # as on a full disk, the kernel cannot be written there
    assert loader.load(QUICK).alone_address
    assert not loader.is_compiled(QUICK, host())
    (said,) = (record.getMessage() for record in caplog.records)
    not_kept = "the kernel float32-2 could not be kept: [Errno 21] Is a directory: "
    assert said.startswith(not_kept)
    assert said.endswith("; each process compiles it for itself")


def test_who_fills_a_cache_that_cannot_keep_a_kernel_is_told_why(begun: list[str]) -> None:
    loader.path(QUICK, host()).mkdir()
    ((kernel, failure),) = warm.fill(host(), [QUICK], jobs=1)
    assert (kernel, begun) == (QUICK, ["float32-2"])
    assert failure.startswith("the kernel float32-2 could not be kept: [Errno 21] Is a directory: ")


def test_a_cache_that_is_removed_amid_work_is_made_again(begun: list[str]) -> None:
    loader.load(QUICK)
    shutil.rmtree(cache.folder().parent)
    loader.load(QUICK)
    assert begun == ["float32-2"] * 2


def test_a_kernel_is_loaded_from_a_cache_that_can_no_longer_be_written(
    monkeypatch: pytest.MonkeyPatch, compiled: bytes
) -> None:
    compiled_code.write(loader.path(QUICK, host()), compiled)
    loader.load(QUICK)

    def fail() -> Path:
        raise FileNotFoundError("there is no temporary folder")

    monkeypatch.setattr(compiled_code, "is_writable", lambda path: False)
    monkeypatch.setattr(compiled_code, "private_folder", fail)
    loader.load(QUICK)
    assert loader.is_compiled(QUICK, host())


def test_a_kernel_whose_folder_cannot_be_made_is_unavailable_in_a_sentence() -> None:
    (cache.folder() / host()).touch()
    assert not loader.is_compiled(FIRST, host())
    failures = dict(warm.fill(host(), [FIRST], jobs=1))
    assert failures[FIRST].startswith("the kernel float32-1 cannot be compiled: ")
    with pytest.raises(DeviceUnavailableError, match=r"the kernel float32-1 cannot be compiled or read: .*File exists"):
        loader.load(FIRST)


def test_a_private_copy_that_another_user_has_put_in_its_place_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    image_brings_a_kernel(monkeypatch)
    assert cache.folder().is_dir()
    (copy,) = (tmp_path / "tmp").iterdir()
    shutil.rmtree(copy)  # as who cleans /tmp does
    shutil.copytree(compiled_code.cache_folder(), copy)
    copy.chmod(0o777)
    with pytest.raises(DeviceUnavailableError, match="is not a folder that only this user can write to"):
        loader.load(FIRST)


def test_a_name_of_a_processor_that_is_a_path_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CPU_NAME", "../elsewhere")
    with pytest.raises(DeviceUnavailableError, match=r"NUMBA_CPU_NAME is '\.\./elsewhere'; it should be a name"):
        loader.load(FIRST)


@pytest.mark.parametrize("kind", ["of another user", "link", "open to all"])
def test_a_folder_that_others_may_write_to_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    user = os.getuid() + (kind == "of another user")
    monkeypatch.setattr(os, "getuid", lambda: user)
    folder = tmp_path / "tmp" / f"bngrad-{user}"
    if kind == "link":
        folder.symlink_to(tmp_path)
    else:
        folder.mkdir()
        folder.chmod(0o777 if kind == "open to all" else 0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")  # where no folder can be made
    with pytest.raises(PermissionError, match=r"bngrad-\d+, for compiled kernels, is not a folder that only this user"):
        cache.folder()
