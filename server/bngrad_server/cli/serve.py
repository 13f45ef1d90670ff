"""``bngrad serve``."""

from __future__ import annotations

import logging
from typing import Any

import click

from bngrad_server import lifecycle
from bngrad_server.config import MAX_MESSAGE_BYTES, MAX_PORT, ServerConfig
from bngrad_server.pool import WorkerStartError

_DEFAULTS = ServerConfig()


@click.command()
@click.option(
    "--listen",
    multiple=True,
    default=_DEFAULTS.listen,
    show_default=True,
    metavar="ADDRESS",
    help="HOST:PORT (port 0 takes a free one) or unix:PATH; may be given several times.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu"]),
    default=_DEFAULTS.device,
    show_default=True,
    help="What to compute on; auto takes the best that this version supports and this machine has.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    default=_DEFAULTS.threads,
    show_default="every core",
    help="Threads of each CPU worker. Results have the same bits for any number.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=_DEFAULTS.workers,
    show_default="2 where there are two cores",
    help="Worker processes on the CPU. With several, requests go on where one dies.",
)
@click.option(
    "--arena-bytes",
    type=click.IntRange(min=1),
    default=_DEFAULTS.arena_bytes,
    show_default="half of the memory",
    help="Memory for the tensors of all requests in flight; pages are taken when first used.",
)
@click.option(
    "--shared-bytes",
    type=click.IntRange(min=0),
    default=_DEFAULTS.shared_bytes,
    show_default="a quarter of the memory",
    help="Memory that clients on this host may share with the workers; 0 shares none.",
)
@click.option(
    "--shared-group",
    default=_DEFAULTS.shared_group,
    show_default="nobody else",
    help="Group of users, beside the server's own, that may share memory.",
)
@click.option(
    "--stream-port",
    type=click.IntRange(min=0, max=MAX_PORT),
    default=_DEFAULTS.stream_port,
    show_default="a free one",
    help="TCP port of the endpoint for large tensors, on the host of the first TCP address.",
)
@click.option(
    "--max-message-bytes",
    type=click.IntRange(min=1, max=MAX_MESSAGE_BYTES),
    default=_DEFAULTS.max_message_bytes,
    show_default="so that 64 fill a quarter of the memory",
    help="Largest request or answer that may come in one message; chunks and shared memory have no such limit.",
)
@click.option(
    "--max-batch-jobs",
    type=click.IntRange(min=1),
    default=_DEFAULTS.max_batch_jobs,
    show_default=True,
    help="The most requests that a worker gets at once.",
)
@click.option(
    "--max-batch-bytes",
    type=click.IntRange(min=1),
    default=_DEFAULTS.max_batch_bytes,
    show_default=True,
    help="A batch is closed once its staged bytes reach this.",
)
@click.option(
    "--max-batch-delay",
    "max_batch_delay_s",
    type=click.FloatRange(min=0),
    default=_DEFAULTS.max_batch_delay_s,
    show_default=True,
    help="Seconds that a request may wait for others to fill its batch.",
)
@click.option(
    "--max-requests",
    type=click.IntRange(min=1),
    default=_DEFAULTS.max_requests,
    show_default=True,
    help="Requests in the server at once; beyond, clients are told to come again.",
)
@click.option(
    "--max-wait",
    "max_wait_s",
    type=click.FloatRange(min=0, min_open=True),
    default=_DEFAULTS.max_wait_s,
    show_default=True,
    help="Seconds that a request may have to wait for others; beyond, clients are told to come again.",
)
@click.option(
    "--transfer-timeout",
    "transfer_timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=_DEFAULTS.transfer_timeout_s,
    show_default=True,
    help="Seconds that an upload or a download may take, beside a second for each 128 KiB.",
)
@click.option(
    "--worker-timeout",
    "worker_timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=_DEFAULTS.worker_timeout_s,
    show_default=True,
    help="Seconds of silence after which a worker is killed and replaced.",
)
@click.option(
    "--drain-timeout",
    "drain_timeout_s",
    type=click.FloatRange(min=0),
    default=_DEFAULTS.drain_timeout_s,
    show_default=True,
    help="Seconds that requests in flight may take to end after SIGTERM.",
)
def serve(**settings: Any) -> None:
    """Runs a server.

    SIGTERM or Ctrl-C stops it once the requests in flight have ended; a second one stops it at once.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    try:
        lifecycle.serve(ServerConfig(**settings))
    except (lifecycle.ListenError, WorkerStartError) as error:
        raise click.ClickException(str(error)) from error
