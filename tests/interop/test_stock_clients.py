"""The examples that use stock gRPC and generated code, built and run as a user does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.security.authority import HOSTS, Authority
from tests.servers import free_port

from bngrad_cli.embedded import EmbeddedServer
from bngrad_cli.main import main as command_line

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TIMEOUT_S = 600

CPP_PACKAGES = "cmake g++ make pkg-config libgrpc++-dev libprotobuf-dev protobuf-compiler-grpc"
JAVASCRIPT_PACKAGES = "nodejs npm"
JAVA_JARS = Path("/usr/share/java")
JAVA_PACKAGES = (
    "make default-jdk-headless libgrpc-java libnetty-java libnetty-tcnative-java libperfmark-java libprotobuf-java"
    " protobuf-compiler-grpc-java-plugin"
)
GO_SOURCES = Path("/usr/share/gocode/src")
GO_PACKAGES = (
    "make golang-go golang-google-grpc-dev golang-github-golang-protobuf-1-5-dev protoc-gen-go-1-5 protoc-gen-go-grpc"
)


def run(*command: object, exit_code: int = 0) -> str:
    """Runs a command, checks its exit code, and returns its output."""
    finished = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=TIMEOUT_S)
    output = finished.stdout + finished.stderr
    assert finished.returncode == exit_code, output
    return output


def require(available: bool, what: str, packages: str) -> None:
    if not available:
        sentence = f"{what} needs programs that are missing here; on Debian: apt-get install {packages}"
        if os.environ.get("BNGRAD_REQUIRE_INTEROP"):
            pytest.fail(sentence)
        pytest.skip(sentence)


def has_programs(*names: str) -> bool:
    return all(shutil.which(name) for name in names)


@pytest.fixture(scope="session")
def cpp(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    libraries = ["pkg-config", "--exists", "grpc++", "protobuf"]
    programs = has_programs("cmake", "g++", "make", "pkg-config", "protoc", "grpc_cpp_plugin")
    available = programs and subprocess.run(libraries).returncode == 0
    require(available, "the C++ client", CPP_PACKAGES)
    build = tmp_path_factory.mktemp("cpp")
    run("cmake", "-S", EXAMPLES / "cpp", "-B", build, "-D", "CMAKE_CXX_FLAGS=-O0")  # compiles fastest
    run("cmake", "--build", build, "-j4")
    return [build / "client"]


@pytest.fixture(scope="session")
def javascript(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    require(has_programs("node", "npm"), "the JavaScript client", JAVASCRIPT_PACKAGES)
    copy = tmp_path_factory.mktemp("javascript")
    for folder in ("protos", "examples/protos", "examples/javascript"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("node_modules"))
    run("npm", "ci", "--prefer-offline", "--prefix", copy / "examples/javascript")
    return ["node", copy / "examples/javascript/client.mjs"]


@pytest.fixture(scope="session")
def java(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    jars = all((JAVA_JARS / f"{name}.jar").exists() for name in ("grpc-netty", "netty-codec-http2", "perfmark-api"))
    require(jars and has_programs("make", "javac", "protoc", "grpc_java_plugin"), "the Java client", JAVA_PACKAGES)
    return [make("java", tmp_path_factory.mktemp("java"))]


@pytest.fixture(scope="session")
def go(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    sources = all((GO_SOURCES / f"google.golang.org/{name}").exists() for name in ("grpc", "protobuf", "genproto"))
    programs = has_programs("make", "go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc")
    require(sources and programs, "the Go client", GO_PACKAGES)
    return [make("go", tmp_path_factory.mktemp("go"))]


def make(language: str, build: Path) -> Path:
    run("make", "-C", EXAMPLES / language, f"BUILD={build}")
    return build / "example"


@pytest.fixture(scope="session")
def python() -> list[object]:
    return [sys.executable, EXAMPLES / "stock_python_client.py"]


@pytest.mark.parametrize(
    ("options", "batch", "exit_code", "words"),
    [
        pytest.param([], [], 0, ["x_backprop (2, 8, 8, 16): largest error"], id="small"),
        # Request and response are both larger than the 4 MiB that gRPC lets through by default.
        pytest.param([], ["2048"], 0, ["x_backprop (2048, 8, 8, 16): largest error"], id="large"),
        pytest.param(["--bad"], [], 1, ["INVALID_ARGUMENT: scale must have", "field scale: scale must have"], id="bad"),
    ],
)
@pytest.mark.parametrize(
    ("language", "transport"),
    [
        *((language, "unix") for language in ("cpp", "javascript", "python", "go")),
        # Debian's grpc-java is older than its names for Unix sockets.
        *((language, "tcp") for language in ("cpp", "javascript", "python", "go", "java")),
    ],
)
def test_a_stock_client_works(
    request: pytest.FixtureRequest,
    targets: dict[str, str],
    language: str,
    transport: str,
    options: list[str],
    batch: list[str],
    exit_code: int,
    words: list[str],
) -> None:
    client = request.getfixturevalue(language)
    output = run(*client, *options, targets[transport], *batch, exit_code=exit_code)
    for word in words:
        assert word in output.replace("InvalidArgument", "INVALID_ARGUMENT")  # as Go calls it


@pytest.mark.parametrize(
    "words",
    [
        *((batch,) for batch in ("x", "2x", "1.5", "0", "-1", "", "100001", "99999999999", "9" * 30)),
        ("2", "3"),
        ("--surprise",),
        ("--ca",),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("language", ["cpp", "javascript", "python", "go", "java"])
def test_a_client_that_is_called_wrongly_says_how_to_call_it(
    request: pytest.FixtureRequest, language: str, words: tuple[str, ...]
) -> None:
    client = request.getfixturevalue(language)
    options = words if words[0].startswith("--") else ()
    output = run(*client, *options, "localhost:1", *(() if options else words), exit_code=2)
    assert "BATCH" in output
    assert not re.search("Traceback|Exception|terminate|panic|at .*mjs", output)


@pytest.mark.parametrize("language", ["cpp", "javascript", "python", "go", "java"])
def test_a_client_says_that_nothing_listens(request: pytest.FixtureRequest, language: str) -> None:
    output = run(*request.getfixturevalue(language), f"localhost:{free_port()}", exit_code=1)
    assert re.search("connection refused|ECONNREFUSED", output, re.IGNORECASE)


@pytest.mark.parametrize(
    ("language", "unauthenticated"),
    [
        ("cpp", "status 16"),
        ("go", "Unauthenticated"),
        ("java", "UNAUTHENTICATED"),
        ("javascript", "UNAUTHENTICATED"),
    ],
)
def test_a_client_to_copy_speaks_tls_and_sends_a_token(
    request: pytest.FixtureRequest, tmp_path: Path, language: str, unauthenticated: str
) -> None:
    client = request.getfixturevalue(language)
    authority = Authority(tmp_path)
    pair = authority.issue(*HOSTS)
    made = CliRunner().invoke(command_line, ["token", "new", "alice", "--token-file", str(tmp_path / "tokens")])
    (tmp_path / "token").write_text(made.stdout)
    options = ("--tls-certificate", str(pair.certificate), "--tls-key", str(pair.key))
    server = EmbeddedServer("localhost:0", options=(*options, "--token-file", str(tmp_path / "tokens")))
    with server:
        trusted = (*client, "--ca", authority.path)
        assert "x_backprop (2, 8, 8, 16)" in run(*trusted, "--token-file", tmp_path / "token", server.target)
        assert f"{unauthenticated}: a valid token is needed" in run(*trusted, server.target, exit_code=1)
