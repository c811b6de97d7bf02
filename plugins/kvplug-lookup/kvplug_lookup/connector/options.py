"""Options of the connector "lookup"."""

from __future__ import annotations

import attrs

from kvplug import option


@attrs.frozen(kw_only=True)
class LookupConnectorOptions:
    """How the connector "lookup" saves and loads."""

    async_load: bool = option(
        default=False,
        help="Load in the background while other requests compute, instead of layer by layer"
        " in front of the request's own forward pass.",
    )
    save_timeout_s: float = option(
        default=10.0,
        unit="seconds",
        help="How long a saved prompt waits for room in the store before it is given up (and counted).",
    )
    max_pending_saves: int = option(
        default=8,
        unit="prompts",
        help="Prompts that may be gathered and not yet stored; one more is given up (and counted).",
    )
    fence_timeout_s: float = option(
        default=2.0,
        unit="seconds",
        help="How long a new request waits to hear that everything stored before it came in is known here.",
    )
