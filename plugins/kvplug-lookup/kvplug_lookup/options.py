"""Options of the lookup buffer "simple"."""

from __future__ import annotations

import math

import attrs

from kvplug import option


@attrs.frozen(kw_only=True)
class SimpleOptions:
    """What the lookup buffer "simple" does when an entry comes and there is no room for it."""

    evict: str = option(
        default="auto",
        help='"never": the insert waits until entries were taken; "oldest": the oldest entries that'
        ' nobody is reading go; "auto": the latter under a connector, which keeps a cache, else the former.',
        validator=attrs.validators.in_(("auto", "never", "oldest")),
    )
    ttl_s: float | None = option(
        default=None,
        unit="seconds",
        help="Entries older than this go, oldest first, when room is needed, whatever `evict` says;"
        " none stands for never.",
        validator=attrs.validators.optional(
            attrs.validators.and_(attrs.validators.ge(0), attrs.validators.lt(math.inf))
        ),
    )
