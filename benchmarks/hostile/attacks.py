"""Every attack, by name, with what it does and which doors it hits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.hostile import announcing, floods, half_made, messages, services, strangers
from benchmarks.hostile.victim import Victim

_TCP = ("tcp",)
_ALL = ("tcp", "unix")


@dataclass(frozen=True)
class Attack:
    """An attack, which goes on until its process is killed.

    Attributes:
        run: Attacks one door of a server.
        doors: The doors it attacks, all at once; see `Victim.addresses`.
        is_limited: Whether the server should limit what each client may have in it, for this attack to mean anything.
    """

    run: Callable[[Victim], None]
    doors: tuple[str, ...]
    is_limited: bool = True

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def description(self) -> str:
        assert self.run.__doc__ is not None
        return self.run.__doc__


_LIST = (
    Attack(announcing.announce_then_nothing, _ALL, is_limited=False),
    Attack(announcing.announce_then_drip, _ALL, is_limited=False),
    Attack(announcing.announce_then_trickle, _ALL, is_limited=False),
    Attack(announcing.ask_for_everything, _ALL, is_limited=False),
    Attack(half_made.dripping_uploads, _ALL, is_limited=False),
    Attack(messages.unknown_fields, _ALL),
    Attack(messages.unknown_fields_slowly, _ALL),
    Attack(messages.nested_fields, _ALL),
    Attack(messages.bombs, _ALL),
    Attack(messages.unended_messages, _ALL),
    Attack(messages.unread_responses, _TCP),
    Attack(messages.unread_exchanges, _ALL),
    Attack(messages.quick_cancels, _ALL),
    Attack(floods.closed_stream_updates, _TCP),
    Attack(floods.closed_stream_data, _TCP),
    Attack(floods.flood_settings, _TCP),
    Attack(floods.flood_pings, _TCP),
    Attack(floods.flood_priorities, _TCP),
    Attack(floods.flood_window_updates, _TCP),
    Attack(floods.flood_unknown_frames, _TCP),
    Attack(floods.flood_continuations, _TCP),
    Attack(floods.flood_resets, _TCP),
    Attack(floods.flood_tenants_resets, _ALL),
    Attack(floods.flood_empty_data, _ALL),
    Attack(floods.flood_padding, _ALL),
    Attack(floods.flood_short_chunks, _ALL),
    Attack(floods.huge_metadata, _TCP),
    Attack(half_made.half_made_calls, _TCP),
    Attack(half_made.half_made_local_calls, ("unix",)),
    Attack(half_made.half_made_messages, _ALL),
    Attack(half_made.half_open, _TCP),
    Attack(half_made.headers_byte_by_byte, _TCP),
    Attack(half_made.idle_connections, _TCP),
    Attack(strangers.wrong_tls, _TCP),
    Attack(strangers.wrong_tokens, _TCP),
    Attack(strangers.new_handshakes, _TCP),
    Attack(strangers.garbage, _TCP),
    Attack(services.open_streams, _TCP),
    Attack(services.server_infos, _TCP),
    Attack(services.lease_floods, ("regions",)),
    Attack(services.hold_leases, ("regions",)),
    Attack(services.http_floods, ("http",)),
)
ATTACKS = {attack.name: attack for attack in _LIST}
