from __future__ import annotations

from typing import Any

import pytest

from bngrad_server.config import ServerConfig


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"listen": ()}, "listen must name at least one address"),
        ({"device": "tpu"}, "device must be 'auto' or 'cpu', not 'tpu'"),
        ({"threads": 0}, "threads must be at least 1, not 0"),
        ({"arena_bytes": -5}, "arena_bytes must be at least 1, not -5"),
        ({"max_batch_jobs": 0}, "max_batch_jobs must be at least 1, not 0"),
        ({"max_batch_bytes": 0}, "max_batch_bytes must be at least 1, not 0"),
        ({"drain_timeout_s": float("nan")}, "drain_timeout_s must not be negative, not nan"),
    ],
)
def test_an_impossible_setting_is_refused_by_name(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServerConfig(**setting)


def test_the_defaults_fit_the_machine() -> None:
    config = ServerConfig()
    assert config.threads >= 1
    assert config.arena_bytes > 2**20
