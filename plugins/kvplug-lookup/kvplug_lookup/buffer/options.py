"""Options of the lookup buffer "simple"."""

from __future__ import annotations

from typing import Literal

import attrs

from kvplug.transport import option


@attrs.frozen(kw_only=True)
class SimpleOptions:
    """How the lookup buffer "simple" makes room for entries."""

    evict: Literal["never", "oldest"] = option(
        default="never",
        help="never: an insert waits until there is room. oldest: it evicts the oldest entries that are not"
        " being read.",
    )
    ttl_s: float | None = option(
        default=None,
        unit="seconds",
        at_least=0,
        help="Entries older than this are evicted, oldest first, when room is needed, even if `evict` is"
        " never. None: no age limit.",
    )
