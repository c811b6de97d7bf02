"""Options of the connector "lookup"."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from kvplug.transport import Address, option


def _published_at(_: Any, attribute: Any, value: str | None) -> None:
    """An address that ZeroMQ binds: tcp with any host or port as "*", or a path."""
    if value is None or (value == "engine" and attribute.name == "events"):
        return
    kind, _, rest = value.partition("://")
    if kind == "tcp":
        host, _, port = rest.rpartition(":")
        Address.parse(f"{'[::]' if host == '*' else host}:{'0' if port == '*' else port}")
    elif kind == "ipc":
        Address.parse_server(f"unix:{rest}")
    else:
        raise ValueError('allowed is an address such as "tcp://127.0.0.1:5557" or "ipc:///run/kvplug/events"')


@attrs.frozen(kw_only=True)
class LookupConnectorOptions:
    """How the connector "lookup" saves and loads."""

    async_load: bool = option(
        default=False,
        help="Load in the background while other requests compute, instead of layer by layer"
        " in front of the request's own forward pass.",
    )
    page_tokens: int | None = option(
        default=None,
        unit="tokens",
        at_least=1,
        help="Tokens in a page. Engines that share pages must use the same number. Default: 16, or as many"
        " whole blocks as have 16 tokens where an attention kernel does not let blocks be divided.",
    )
    stall_timeout_s: float = option(
        default=2.0,
        unit="seconds",
        above=0,
        help="A load of which nothing arrives for this long has failed, and its tokens are computed. While"
        " its store or peer serves other loads of this engine it has not, until timeout_s is over. Lower"
        " frees waiting requests sooner; higher tolerates slower stores.",
    )
    wait_timeout_s: float = option(
        default=2.0,
        unit="seconds",
        above=0,
        help="How long a new request waits for KV that is on its way into a store, and for a store's answer."
        " Afterwards it is computed (and counted).",
    )
    load_policy: Literal["auto", "always"] = option(
        default="auto",
        help='When to load what is held. "auto": unless loading is expected to take more than twice as long'
        " as computing, or four times from a peer engine, by what both took before; the rest is counted as"
        ' not_worth_it. "always": whenever something is held.',
    )
    save_timeout_s: float = option(
        default=10.0,
        unit="seconds",
        above=0,
        help="How long a store may take to keep a request's pages of one step before they are given up (and"
        " counted), for each 128 MiB of them.",
    )
    max_unsaved: int | None = option(
        default=None,
        unit="bytes",
        at_least=1,
        help="KV that is copied out of a cache in host memory while it waits to be kept by a store; the store"
        " reads pages beyond it out of the engine's blocks, which stay in use until then. None: as much as"
        " `buffer_size`.",
    )
    events: str | None = option(
        default=None,
        help='Who is told which blocks the first store holds. An address such as "tcp://127.0.0.1:5557":'
        " events are published there for routers, in the form of vLLM's. They show prompts, so other hosts"
        ' are refused unless allow_unauthenticated_data_plane is set. "engine": the engine, which may publish'
        " them itself.",
        validator=_published_at,
    )
    events_replay: str | None = option(
        default=None,
        help="Address at which subscribers ask for events that they missed.",
        validator=_published_at,
    )
    promote: bool = option(
        default=True,
        help="Copy pages that were loaded from a later store of `stores` into the first one.",
    )
