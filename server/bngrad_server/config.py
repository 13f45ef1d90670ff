"""The settings of a server, each declared once, as a field of `ServerConfig`.

The options, the environment variables, the keys of the file and the page of settings follow from the fields.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasGenerator, Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from bngrad_kernels import machine
from bngrad_server.setting_types import (
    IN_MEMORY,
    NONE,
    Addresses,
    Advertised,
    Bytes,
    Computed,
    Device,
    HostNames,
    HttpAddress,
    Metavar,
    Mode,
    Seconds,
    at_least,
)
from bngrad_wire.addresses import host_and_port
from bngrad_wire.limits import MAX_PROTOBUF_NBYTES, REGION_NBYTES

MAX_BATCH_JOBS = 512
"""A batch of this size fits the packet that a worker gets, see `bngrad_server.workers.ipc`."""
_MAX_THREADS = 1024
"""Even two cores start that many in a second; for four times as many, a worker is silent for too long."""
_MAX_WORKERS = 256
"""Two cores start that many in 47 s, with 5 GB of memory; of twice as many, none was ready after 90 s."""
_DEFAULT_MESSAGES = 64
_LEAST_DEFAULT_MESSAGE_BYTES = 2**26
_MIB = 2**20


def default_max_message_bytes() -> int:
    """Returns the size at which `_DEFAULT_MESSAGES` messages take a quarter of the memory, within limits."""
    return min(max(default_arena_bytes() // 2 // _DEFAULT_MESSAGES, _LEAST_DEFAULT_MESSAGE_BYTES), MAX_PROTOBUF_NBYTES)


def default_arena_bytes() -> int:
    """Returns half of the memory that this process may use."""
    return machine.memory_bytes() // 2


def setting_name(field_name: str) -> str:
    """Returns a setting's name in options, the environment and files: its field's name, without the unit of seconds."""
    return field_name.removesuffix("_s")


class ServerConfig(BaseSettings):
    """The settings of `bngrad_server.server.serve`.

    The constructor takes settings, and uses defaults for the others; `bngrad_cli.settings` reads options, environment
    and file. The docstrings of the fields are the help texts of the settings.

    Raises:
        ValueError: A setting is invalid; the message names it.
    """

    model_config = SettingsConfigDict(
        alias_generator=AliasGenerator(validation_alias=setting_name),
        allow_inf_nan=False,
        enable_decoding=False,  # lists in the environment are not JSON
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
    """Address to listen on, HOST:PORT (port 0 takes a free one) or unix:PATH; may be given several times."""
    device: Device = "auto"
    """Device to compute on: cpu, or GPUs such as cuda:0,cuda:1; auto takes every usable GPU, or the CPU if there is
    none."""
    threads: Annotated[int, Computed("every core")] = Field(default_factory=machine.cores, ge=1, le=_MAX_THREADS)
    """Threads of each CPU worker, at most 1024. Results have the same bits for any number."""
    workers: int = Field(default=2, ge=1, le=_MAX_WORKERS)
    """Worker processes on a CPU, at most 256. With more than one, small requests run side by side, and serving goes on
    if one dies."""
    arena_bytes: Annotated[
        Bytes,
        at_least(_MIB, "1MiB", "the tensors of every request have to fit in"),
        IN_MEMORY,
        Computed("half of the memory; with GPUs at most half of pinned_bytes"),
    ] = Field(default_factory=default_arena_bytes)
    """Memory for the tensors of all requests in flight. With more of it, more requests can wait with their tensors
    already copied; the system provides pages when they are first used."""
    shared_bytes: Annotated[
        Bytes,
        at_least(REGION_NBYTES, f"{REGION_NBYTES // _MIB}MiB", "clients take that much at a time", or_none=True),
        IN_MEMORY,
        Computed("a quarter of the memory"),
    ] = Field(default_factory=lambda: default_arena_bytes() // 2)
    """Memory that clients on this host may share with the workers; 0 for none. One client gets at most half of it. The
    system provides pages when they are first used."""
    pinned_bytes: Bytes = Field(default=32 * 2**30, ge=0)
    """Memory that GPU workers may page-lock, so that copies are fast and overlap with kernels: the arena if it fits,
    then the memory that clients share. The system provides it at once."""
    gpu_memory_bytes: Annotated[
        Bytes, at_least(64 * _MIB, "64MiB", "copies and kernels have to overlap", or_none=True)
    ] = 0
    """Most memory of each GPU that its worker takes for tensors, to leave room for other programs; 0 for nine tenths of
    it. Requests that do not fit are computed in parts."""
    shared_group: Annotated[str | None, Metavar("GROUP"), Computed("none")] = None
    """Group of users that may share memory, besides the server's own user, who must be in it, too."""
    advertise_stream: Annotated[
        Advertised | None, Metavar("HOST:PORT|none"), Computed("the address that a client was given")
    ] = None
    """Where the SDK connects by its own HTTP/2 instead, such as past a gateway; none for nowhere, as behind a proxy
    that balances calls."""
    max_message_bytes: Annotated[
        Bytes,
        at_least(4 * _MIB, "4MiB", "clients send chunks and small requests in messages of up to that size"),
        Computed("so that 64 fill a quarter of the memory; 64MiB to 2GiB"),
    ] = Field(default_factory=default_max_message_bytes, le=MAX_PROTOBUF_NBYTES)
    """Largest message of a request sent whole. Tensors in chunks or in shared memory are not limited, since they are
    never held in a message."""
    max_batch_jobs: int = Field(default=64, ge=1, le=MAX_BATCH_JOBS)
    """Most requests in a batch, at most 512. A larger batch makes small requests cheaper, but delays the first one."""
    max_batch_bytes: Annotated[Bytes, Computed("8MiB; with GPUs 32MiB")] = Field(default=8 * 2**20, ge=1)
    """A batch gets no more requests once its tensors have this size. Large requests gain nothing from batching."""
    front_bytes: Annotated[Bytes, IN_MEMORY] = Field(default=3 * 2**20, ge=0)
    """Requests for a CPU whose tensors have at most this size are computed in the server's front process, in less time
    than a hop to a worker process takes. So are requests in shared memory of up to 128 times this size while nothing
    else is in the server. 0 leaves all computing to workers."""
    max_batch_delay_s: Seconds = Field(default=0.0, ge=0)
    """How long a request may wait for others to fill its batch while a worker is free. 0 is best unless requests are
    tiny."""
    max_requests: int = Field(default=256, ge=1)
    """Most requests in the server at once; further ones are refused, and clients retry later. Clients with less than an
    even share are refused from twice this number on."""
    max_wait_s: Seconds = Field(default=5.0, gt=0)
    """Longest expected wait of a request for those before it; beyond it, requests are refused, and clients retry
    later."""
    transfer_timeout_s: Annotated[Seconds, at_least(1, "1 s", "healthy clients may pause for a good part of that")] = (
        30.0
    )
    """How long a client may keep the server waiting for the next request of an exchange. A transfer may stand still for
    as long, but at most 5 s, and has to move 128 KiB a second on average, since it holds memory."""
    worker_timeout_s: Annotated[
        Seconds, at_least(1, "1 s", "healthy workers may be silent for a good part of that")
    ] = 5.0
    """A worker that sends no sign of life for this time is killed and replaced."""
    drain_timeout_s: Seconds = Field(default=30.0, ge=0)
    """How long requests in flight may take to end after SIGTERM."""
    tls_certificate: Annotated[Path | None, Metavar("FILE"), Computed("no TLS")] = None
    """Certificate of the server, a PEM file; with it, TCP ports accept only TLS. It is read again when it changes, as
    are the files of the next three settings."""
    tls_key: Annotated[Path | None, Metavar("FILE"), Computed("none")] = None
    """Private key of the certificate, a PEM file without a password."""
    tls_client_ca: Annotated[Path | None, Metavar("FILE"), Computed("clients need no certificate")] = None
    """Authorities of clients, a PEM file; with it, clients on TCP ports need a certificate signed by one of them."""
    token_file: Annotated[Path | None, Metavar("FILE"), Computed("calls need no token")] = None
    """Valid tokens, in lines as `bngrad token new` prints them; with it, every call at every address needs one."""
    open_health: bool = False
    """Whether grpc.health.v1 answers without a token."""
    insecure: bool = False
    """Whether the network is protected otherwise: no warnings about ports without TLS or tokens, or about http."""
    reflection: bool = True
    """Whether gRPC server reflection lists the methods."""
    socket_mode: Mode = "0600"
    """Permissions of the Unix sockets to listen on, in octal: users who may write to one may call."""
    max_client_requests: Annotated[int, Computed("0, no limit")] = Field(default=0, ge=0)
    """Most requests of one client in the server at once; further ones are refused, and the client retries later.
    Clients are told apart by token, else by certificate, else by host or, at Unix sockets, by process."""
    max_client_bytes: Annotated[Bytes, Computed("0, no limit")] = Field(default=0, ge=0)
    """Most bytes of one client's tensors in the server at once; further requests are refused, and the client retries
    later. One that is larger by itself is always refused."""

    http: Annotated[HttpAddress | None, Metavar("HOST:PORT"), Computed("none")] = None
    """Address to serve HTTP on: /metrics, /healthz, /readyz, and a dashboard at /. It has neither TLS nor tokens; the
    server warns if other hosts can reach it."""
    http_names: Annotated[HostNames | None, Metavar("NAMES"), Computed("none")] = None
    """Further host names by which the HTTP port may be asked, with commas between them, such as a proxy's. Addresses,
    the machine's own names and those of private networks are always answered."""
    log_format: Literal["console", "json"] = "console"
    """Format of the log on stderr: lines for people, or a JSON object in each line."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level of the lines to log; debug also logs requests that clients cancelled, and how connections end."""
    traces: bool = False
    """Whether OpenTelemetry spans of every request are exported by OTLP, as the OTEL_* variables configure it."""

    @property
    def has_cores_for_all(self) -> bool:
        """Whether every CPU worker has cores of its own, so that several compute faster than one."""
        return self.workers * self.threads <= machine.cores()

    @property
    def advertised_stream(self) -> tuple[str, int] | None:
        """The host and port of ``advertise_stream``; None if it names none."""
        return None if self.advertise_stream is None else host_and_port(self.advertise_stream)

    @classmethod
    def settings_customise_sources(  # noqa: D102 - documented in the base class
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
    def _check_addresses(self) -> ServerConfig:
        bound = [address for address in self.listen if not address.endswith(":0")]
        for address in bound:
            if bound.count(address) > 1:
                raise ValueError(f"listen names {address} twice")
            if self.http == address:
                raise ValueError(f"http should not be {address}, which listen names")
        is_local = all(address.startswith("unix:") for address in self.listen)
        if is_local and self.advertise_stream not in (None, NONE):
            raise ValueError(
                f"advertise_stream needs an address HOST:PORT in listen, to which {self.advertise_stream} leads"
            )
        return self

    @model_validator(mode="after")
    def _check_together(self) -> ServerConfig:
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
