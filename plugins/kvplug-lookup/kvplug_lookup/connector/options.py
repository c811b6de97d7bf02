"""Options of the connector "lookup"."""

from __future__ import annotations

import attrs

from kvplug.transport import option


@attrs.frozen(kw_only=True)
class LookupConnectorOptions:
    """How the connector "lookup" saves and loads."""

    async_load: bool = option(
        default=False,
        help="Load in the background while other requests compute, instead of layer by layer"
        " in front of the request's own forward pass.",
    )
    stall_timeout_s: float = option(
        default=2.0,
        unit="seconds",
        above=0,
        help="A load of which nothing has come for this long has failed: its peer is stopped, or too slow. No"
        " step waits longer for it. Must be more than one layer of the longest prompt takes.",
    )
    save_timeout_s: float = option(
        default=10.0,
        unit="seconds",
        help="How long a saved prompt waits for room in the store before it is given up (and counted).",
    )
    max_unsaved: int | None = option(
        default=None,
        unit="bytes",
        at_least=1,
        help="KV that may be gathered and not yet stored; the prompt that would be more is given up (and"
        " counted), unless it is the only one. None: as much as `buffer_size`.",
    )
    fence_timeout_s: float = option(
        default=2.0,
        unit="seconds",
        help="How long a new request waits to hear that everything stored before it came in is known here.",
    )
