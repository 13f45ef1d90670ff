"""The checks of targets."""

from __future__ import annotations

from typing import Any

import pytest

import bngrad
from bngrad._validation import check_targets, host_and_port_of


@pytest.mark.parametrize(
    ("target", "targets"),
    [
        ("a:1", ["a:1"]),
        (["a:1"], ["a:1"]),
        (("a:1", "unix:/b", "a:1"), ["a:1", "unix:/b"]),
        (["dns:///a:1", "[::1]:2"], ["dns:///a:1", "[::1]:2"]),
    ],
)
def test_one_target_or_several(target: Any, targets: list[str]) -> None:
    assert check_targets(target) == targets


@pytest.mark.parametrize("target", [None, 5, b"a:1", {"a:1"}])
def test_a_target_must_be_a_string_a_sequence_or_a_function(target: Any) -> None:
    with pytest.raises(TypeError, match=rf"^target must be a str, a sequence .* returns either, not {target!r}$"):
        check_targets(target)


@pytest.mark.parametrize("target", [["a:1", None], [b"a:1"], [["a:1"]]])
def test_each_of_several_targets_must_be_a_string(target: Any) -> None:
    with pytest.raises(TypeError, match=r"^target must be a str, not "):
        check_targets(target)


@pytest.mark.parametrize(
    "target",
    [
        *([], "", ["a:1", ""], ["http://a:1"], "localhost", "a:0", "a:65536", ":", ":1", "a:", "a:b", "a:-1", "a:1.5"),
        *("a b:1", "a:1\n", "::1:1", "[::1]", "a:\u0661", "\ud800:1", "a\0:1", "nobody:/a", "a:" + "9" * 5000),
        *("unix:", "unix:///", "unix-abstract:", "dns:", "unix:/\ud800", "unix:/a\0b", "unix:/" + "a" * 107),
    ],
)
def test_malformed_targets_are_refused(target: Any) -> None:
    with pytest.raises(bngrad.InvalidArgumentError, match="target must ") as refused:
        check_targets(target)
    assert refused.value.violations[0].field == "target"


@pytest.mark.parametrize(
    ("target", "host_and_port"),
    [
        ("a:1", ("a", 1)),
        ("dns:a:1", ("a", 1)),
        ("dns:///a.b:1", ("a.b", 1)),
        ("[::1]:2", ("::1", 2)),
        ("127.0.0.1:50051", ("127.0.0.1", 50051)),
        ("a", None),
        ("unix:/a:1", None),
        ("unix:a", None),
        ("ipv4:127.0.0.1:1", None),
        ("dns://8.8.8.8/a:1", None),
    ],
)
def test_host_and_port(target: str, host_and_port: tuple[str, int] | None) -> None:
    assert host_and_port_of(target) == host_and_port
