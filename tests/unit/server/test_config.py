"""The checks and conversions of settings."""

from __future__ import annotations

from typing import Any

import pytest

from bngrad_server.config import ServerConfig


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"listen": ()}, "listen\n.*at least 1 item"),
        ({"listen": ("localhost",)}, "listen.0\n.*should be HOST:PORT or unix:PATH"),
        ({"listen": ("localhost:65536",)}, "listen.0\n.*should be HOST:PORT or unix:PATH"),
        ({"listen": ("tcp://localhost:1",)}, "listen.0\n.*should be HOST:PORT or unix:PATH"),
        ({"listen": ("unix:",)}, "listen.0\n.*should be HOST:PORT or unix:PATH"),
        ({"device": "tpu"}, "device\n.*it should be auto, or 'cpu' or 'cuda:N'"),
        ({"device": "cuda:0,auto"}, "device\n.*it should be auto, or 'cpu'"),
        ({"device": "cuda:0,cuda:0"}, "device\n.*once"),
        ({"pinned_bytes": -1}, "pinned_bytes\n.*greater than or equal to 0"),
        ({"threads": 0}, "threads\n.*greater than or equal to 1"),
        ({"threads": 20000}, "threads\n.*less than or equal to 1024"),
        ({"workers": 2000}, "workers\n.*less than or equal to 256"),
        ({"front_bytes": 10**20}, "front_bytes\n.*memory"),
        ({"threads": True}, "threads\n.*should be a number, not a boolean"),
        ({"workers": False}, "workers\n.*should be a number, not a boolean"),
        ({"max_wait_s": True}, "max_wait_s\n.*should be a number, not a boolean"),
        ({"arena_bytes": -5}, "arena_bytes\n.*at least 1MiB: the tensors of every request have to fit in"),
        ({"arena_bytes": 2**20 - 1}, "arena_bytes\n.*at least 1MiB: the tensors of every request have to fit in"),
        ({"arena_bytes": "1000 TiB"}, r"arena_bytes\n.*at most \d+, the memory that this process may use"),
        ({"shared_bytes": -1}, "shared_bytes\n.*should be 0 for none, or at least 64MiB"),
        ({"shared_bytes": "1MiB"}, "shared_bytes\n.*should be 0 for none, or at least 64MiB: clients take that much"),
        ({"shared_bytes": 2**60}, "shared_bytes\n.*at most"),
        ({"max_message_bytes": 1}, "max_message_bytes\n.*at least 4MiB: clients send chunks and small requests"),
        (
            {"transfer_timeout_s": "100ms"},
            "transfer_timeout_s\n.*at least 1 s: healthy clients may pause for a good part",
        ),
        ({"worker_timeout_s": "100ms"}, "worker_timeout_s\n.*at least 1 s: healthy workers may be silent"),
        ({"drain_timeout_s": 1e300}, "drain_timeout_s\n.*less than or equal to 604800"),
        ({"http": "none"}, "http\n.*should be HOST:PORT"),
        ({"http": "unix:/a"}, "http\n.*should be HOST:PORT"),
        ({"arena_bytes": "8 miles"}, "arena_bytes\n.*with one of the units B, kB, MB"),
        ({"max_message_bytes": 2**31}, "max_message_bytes\n.*less than or equal to 2147483647"),
        ({"max_batch_jobs": 0}, "max_batch_jobs\n.*greater than or equal to 1"),
        ({"max_batch_jobs": 513}, "max_batch_jobs\n.*less than or equal to 512"),
        ({"max_batch_bytes": 0.5}, "max_batch_bytes\n.*valid integer"),
        ({"drain_timeout_s": float("nan")}, "drain_timeout_s\n.*finite"),
        ({"max_wait_s": "5 hours"}, "max_wait_s\n.*with one of the units ms, s, min, h"),
        ({"max_waits": 5}, "max_waits\n.*not permitted"),
        ({"listen": ("a:1", "b:2", "a:1")}, "listen names a:1 twice"),
        ({"listen": ("unix:/a",), "advertise_stream": "a:1"}, "advertise_stream needs an address HOST:PORT"),
        ({"advertise_stream": "a"}, "advertise_stream\n.*HOST:PORT, with a port from 1 to 65535, or none"),
        ({"advertise_stream": "a:0"}, "advertise_stream\n.*HOST:PORT, with a port from 1 to 65535, or none"),
        ({"shared_bytes": 0, "shared_group": "users"}, "shared_group needs shared_bytes"),
        ({"max_wait_s": 0.5, "max_batch_delay_s": 0.5}, "max_batch_delay should be less than max_wait"),
        ({"tls_certificate": "a"}, "tls_certificate and tls_key need each other"),
        ({"tls_key": "a"}, "tls_certificate and tls_key need each other"),
        ({"tls_client_ca": "a"}, "tls_client_ca needs tls_certificate and tls_key"),
        ({"socket_mode": "0999"}, "socket_mode\n.*three octal digits"),
        ({"max_client_requests": -1}, "max_client_requests\n.*greater than or equal to 0"),
    ],
)
def test_an_invalid_setting_is_refused_by_name(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServerConfig(**setting)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("max_wait_s", "7", 7.0),
        ("max_wait_s", "500ms", 0.5),
        ("max_wait_s", "1.5 min", 90.0),
        ("max_wait_s", "1h", 3600.0),
        ("arena_bytes", "4194304", 2**22),
        ("arena_bytes", "0.5GiB", 2**29),
        ("max_batch_bytes", "1.3GiB", 1_395_864_371),
        ("max_batch_bytes", "0.29TB", 290_000_000_000),
        ("arena_bytes", "8 mb", 8_000_000),
        ("listen", "a:1, unix:/b", ("a:1", "unix:/b")),
    ],
)
def test_text_may_have_units_and_commas(name: str, text: str, value: object) -> None:
    assert getattr(ServerConfig.model_validate({name: text}), name) == value


def test_the_defaults_fit_the_machine() -> None:
    config = ServerConfig()
    assert config.threads >= 1
    assert config.arena_bytes > 2**20


def test_the_constructor_does_not_read_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BNGRAD_MAX_REQUESTS", "7")
    assert ServerConfig().max_requests == 256


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        ServerConfig().max_requests = 7


def test_an_ipv6_address_for_http_needs_no_brackets() -> None:
    assert ServerConfig(http="::1:9464").http == "[::1]:9464"
