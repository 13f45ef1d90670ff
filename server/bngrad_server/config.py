"""The settings of a server, each declared once: the command line, the environment and the file follow from it.

A new setting is a new field of `ServerConfig`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasGenerator, Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from bngrad_server.runtime import cgroup
from bngrad_server.setting_types import (
    IN_MEMORY,
    Addresses,
    Bytes,
    Computed,
    Device,
    HttpAddress,
    Metavar,
    Port,
    Seconds,
    at_least,
)
from bngrad_wire.limits import MAX_PROTOBUF_NBYTES, REGION_NBYTES

MAX_CALLS = 64
"""Calls of an op that grpcio's port answers at once. Each holds a thread, and each unary one a message."""
_LEAST_DEFAULT_MESSAGE_BYTES = 2**26
_MIB = 2**20


def default_max_message_bytes() -> int:
    """So much that a message for each call takes a quarter of the memory."""
    return min(max(default_arena_bytes() // 2 // MAX_CALLS, _LEAST_DEFAULT_MESSAGE_BYTES), MAX_PROTOBUF_NBYTES)


def default_arena_bytes() -> int:
    """Half of the memory that this process may use."""
    return cgroup.memory_bytes() // 2


def setting_name(field_name: str) -> str:
    """How flags, the environment and files call a setting: by its field's name, without the unit of seconds."""
    return field_name.removesuffix("_s")


class ServerConfig(BaseSettings):
    """What `bngrad_server.server.serve` needs to know.

    Made directly, it has the settings that it is given, and defaults; `bngrad_cli.settings` reads the others'
    sources. The docstrings are what users read of the settings.

    Raises:
        ValueError: A setting is impossible; the message names it.
    """

    model_config = SettingsConfigDict(
        alias_generator=AliasGenerator(validation_alias=setting_name),
        allow_inf_nan=False,
        enable_decoding=False,  # Lists in the environment are no JSON.
        env_ignore_empty=True,
        env_prefix="BNGRAD_",
        env_prefix_target="all",
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_by_alias=True,
        validate_by_name=True,
    )

    listen: Addresses = Field(default=("127.0.0.1:50051",), min_length=1)
    """Where to listen: HOST:PORT (port 0 takes a free one) or unix:PATH; may be given several times."""
    device: Device = "auto"
    """What to compute on: cpu, or GPUs such as cuda:0,cuda:1; auto takes every usable GPU, or the CPU if there is
    none."""
    threads: Annotated[int, Computed("every core")] = Field(default_factory=cgroup.cores, ge=1)
    """Threads of each CPU worker. Results have the same bits for any number."""
    workers: int = Field(default=2, ge=1)
    """Worker processes on a CPU. With more than one, requests go on where one dies, and small ones run side by side."""
    arena_bytes: Annotated[
        Bytes,
        at_least(_MIB, "1MiB", "the tensors of every request have to fit in"),
        IN_MEMORY,
        Computed("half of the memory; with GPUs at most pinned_bytes"),
    ] = Field(default_factory=default_arena_bytes)
    """Memory for the tensors of all requests in flight. More lets more requests wait staged; pages are taken from the
    system only when first used."""
    shared_bytes: Annotated[
        Bytes,
        at_least(REGION_NBYTES, f"{REGION_NBYTES // _MIB}MiB", "clients take so much at a time", or_none=True),
        IN_MEMORY,
        Computed("a quarter of the memory"),
    ] = Field(default_factory=lambda: default_arena_bytes() // 2)
    """Memory that clients on this host may share with the workers, 0 for none; pages are taken when first used."""
    pinned_bytes: Bytes = Field(default=32 * 2**30, ge=0)
    """Memory that GPU workers may page-lock, so that copies are fast and overlap with kernels: the arena if it is not
    larger, then what clients share. It is taken from the system at once."""
    shared_group: Annotated[str | None, Metavar("GROUP"), Computed("nobody else")] = None
    """Group of users, beside the server's own, that may share memory."""
    stream_port: Annotated[Port, Computed("0, a free one")] = 0
    """TCP port of the endpoint for large tensors, on the host of the first TCP address."""
    max_message_bytes: Annotated[
        Bytes,
        at_least(4 * _MIB, "4MiB", "clients send chunks and small requests in messages of up to that size"),
        Computed("so that 64 fill a quarter of the memory"),
    ] = Field(default_factory=default_max_message_bytes, le=MAX_PROTOBUF_NBYTES)
    """Largest message in which a client may send a request whole. Chunks and shared memory have no such limit: their
    tensors never lie in the memory of a message."""
    max_batch_jobs: int = Field(default=64, ge=1)
    """The most requests that a worker gets at once. More makes small requests cheaper, and the first of them later."""
    max_batch_bytes: Bytes = Field(default=8 * 2**20, ge=1)
    """A batch is closed once its staged bytes reach this. Large requests gain nothing from company."""
    max_batch_delay_s: Seconds = Field(default=0.0, ge=0)
    """How long a request may wait for others to fill its batch while a worker is free. 0 is best where requests are not
    tiny."""
    max_requests: int = Field(default=256, ge=1)
    """Requests in the server at once; beyond, clients are told to come again."""
    max_wait_s: Seconds = Field(default=5.0, gt=0)
    """How long a request may have to wait for those before it; where it would be longer, clients are told to come
    again."""
    transfer_timeout_s: Annotated[
        Seconds, at_least(1, "1 s", "connections whose clients do not answer a ping in that time are closed")
    ] = 30.0
    """How long an upload or a download may take, beside a second for each 128 KiB. It holds memory."""
    worker_timeout_s: Annotated[
        Seconds, at_least(1, "1 s", "workers that are well may be silent for a good part of that")
    ] = 5.0
    """A worker that shows no life for so long is killed and replaced."""
    drain_timeout_s: Seconds = Field(default=30.0, ge=0)
    """How long requests in flight may take to end after SIGTERM."""
    tls_certificate: Annotated[Path | None, Metavar("FILE"), Computed("no TLS")] = None
    """Certificate of the server, a PEM file; with it, TCP ports speak TLS alone. It is read again when it changes, as
    are the files of the next three settings."""
    tls_key: Annotated[Path | None, Metavar("FILE"), Computed("none")] = None
    """Private key of the certificate, a PEM file without a password."""
    tls_client_ca: Annotated[Path | None, Metavar("FILE"), Computed("clients need no certificate")] = None
    """Authorities of clients, a PEM file; with it, clients on TCP ports must show a certificate of theirs."""
    token_file: Annotated[Path | None, Metavar("FILE"), Computed("calls need no token")] = None
    """Whose tokens are good, in lines as `bngrad token new` prints them; with it, every call at every address must have
    one."""
    open_health: bool = False
    """Whether grpc.health.v1 answers without a token."""
    insecure: bool = False
    """Whether the network is protected otherwise, so that nothing need be said about ports without TLS or tokens."""
    reflection: bool = True
    """Whether clients may ask what there is to call."""
    socket_mode: Annotated[str, Metavar("MODE")] = Field(default="0600", pattern="^0?[0-7]{3}$")
    """Permissions of Unix sockets to listen on, in octal: whoever may write to one may call."""
    max_client_requests: Annotated[int, Computed("0, no limit")] = Field(default=0, ge=0)
    """Requests in the server at once of one client: the owner of a token, the name in a certificate, else the host or
    the process. Beyond, it is told to come again."""
    max_client_bytes: Annotated[Bytes, Computed("0, no limit")] = Field(default=0, ge=0)
    """Tensors in the server at once of one client that has several requests."""

    http: Annotated[HttpAddress | None, Metavar("HOST:PORT"), Computed("none")] = None
    """Where to serve HTTP: /metrics, /healthz, /readyz, and a page for people at /. Whoever reaches it may read it."""
    log_format: Literal["console", "json"] = "console"
    """Whether the log, on stderr, has lines for people or a JSON object in each."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """What is less important than this is not logged; debug also logs the requests whose clients have gone."""
    traces: bool = False
    """Whether OpenTelemetry spans of every request are exported by OTLP, as the OTEL_* variables say."""
    channelz: bool = False
    """Whether clients may ask for the state of the server's gRPC connections."""

    @property
    def has_cores_for_all(self) -> bool:
        """Whether several CPU workers compute faster together than one of them alone."""
        return self.workers * self.threads <= cgroup.cores()

    @classmethod
    def settings_customise_sources(  # noqa: D102 - its base tells
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        *others: PydanticBaseSettingsSource,
        **by_name: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)

    @field_validator("*", mode="before")
    @classmethod
    def _check_no_boolean_is_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation in (int, float):
            raise ValueError("it should be a number, not a boolean")
        return value

    @model_validator(mode="after")
    def _check_together(self) -> ServerConfig:
        bound = [address for address in self.listen if not address.endswith(":0")]
        for address in bound:
            if bound.count(address) > 1:
                raise ValueError(f"listen names {address} twice")
            if self.stream_port and address.endswith(f":{self.stream_port}"):
                raise ValueError(f"stream_port should not be the port of {address}, where listen is")
        if self.stream_port and all(address.startswith("unix:") for address in self.listen):
            raise ValueError("stream_port needs an address HOST:PORT in listen, on whose host it is")
        if self.shared_group is not None and self.shared_bytes == 0:
            raise ValueError("shared_group needs shared_bytes, which is 0")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key need each other")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("tls_client_ca needs tls_certificate and tls_key")
        if self.max_batch_delay_s >= self.max_wait_s:
            delays = f"{self.max_batch_delay_s:g} s and {self.max_wait_s:g} s"
            raise ValueError(f"max_batch_delay should be less than max_wait, but they are {delays}")
        return self
