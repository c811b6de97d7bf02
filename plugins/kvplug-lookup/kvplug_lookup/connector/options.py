"""Options of the connector "lookup"."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from kvplug.transport import Address, option


def _published_at(_: Any, attribute: Any, value: str | None) -> None:
    """Check an address that ZeroMQ can bind: tcp, where the host or port may be "*", or ipc with a path."""
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
        " during the request's own forward pass.",
    )
    page_tokens: int | None = option(
        default=None,
        unit="tokens",
        at_least=1,
        help="Tokens in a page. Engines that share pages must use the same number. Default: 16, or the"
        " whole blocks that hold 16 tokens if an attention kernel does not allow dividing blocks.",
    )
    stall_timeout_s: float = option(
        default=2.0,
        unit="seconds",
        above=0,
        help="A load fails if nothing arrives for this long, and its tokens are computed. While its store or"
        " peer serves other loads of this engine, it only fails after timeout_s. A lower value frees waiting"
        " requests sooner; a higher one tolerates slower stores.",
    )
    wait_timeout_s: float = option(
        default=2.0,
        unit="seconds",
        above=0,
        help="How long a new request waits for KV that is being saved, and for a store's answer. Then it is"
        " computed (and counted).",
    )
    load_policy: Literal["auto", "always"] = option(
        default="auto",
        help='When to load held pages. "auto": unless past times predict that loading takes more than twice'
        " as long as computing, or four times as long from a peer engine; such requests are counted as"
        ' not_worth_it. "always": whenever pages are held.',
    )
    save_timeout_s: float = option(
        default=10.0,
        unit="seconds",
        above=0,
        help="How long a store may take to save a request's pages of one step, per 128 MiB. Then the pages"
        " are given up (and counted).",
    )
    max_unsaved: int | None = option(
        default=None,
        unit="bytes",
        at_least=1,
        help="Limit on KV copied out of a cache in host memory that waits to be saved by a store. The store"
        " reads further pages from the engine's blocks, which stay in use until then. None: as much as"
        " `buffer_size`.",
    )
    events: str | None = option(
        default=None,
        help="Who receives events about the blocks that the first store holds. An address such as"
        ' "tcp://127.0.0.1:5557": they are published there for routers, in vLLM\'s format. They show prompts,'
        " so other hosts are refused unless allow_unauthenticated_data_plane is set."
        ' "engine": the engine, which may publish them itself.',
        validator=_published_at,
    )
    events_replay: str | None = option(
        default=None,
        help="Address where subscribers ask for events that they missed.",
        validator=_published_at,
    )
    promote: bool = option(
        default=True,
        help="Copy pages that were loaded from a later store of `stores` into the first one.",
    )
