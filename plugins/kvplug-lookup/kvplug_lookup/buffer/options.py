"""Options of the lookup buffer "simple"."""

from __future__ import annotations

from typing import Literal

import attrs

from kvplug.transport import option


@attrs.frozen(kw_only=True)
class SimpleOptions:
    """What the lookup buffer "simple" does when an entry comes and there is no room for it."""

    evict: Literal["never", "oldest"] = option(
        default="never",
        help="never: the insert waits until entries were taken. oldest: the oldest entries that are not being"
        " read go.",
    )
    ttl_s: float | None = option(
        default=None,
        unit="seconds",
        at_least=0,
        help="Entries older than this go, oldest first, when room is needed, whatever `evict` says. None:"
        " they do not age.",
    )
