"""Options of the connector "simple". ``kvplug list`` imports this module, so it must not import torch."""

from __future__ import annotations

import attrs

from kvplug.transport import option


@attrs.frozen(kw_only=True)
class SimpleConnectorOptions:
    """How long the connector "simple" waits for its peer."""

    match_timeout_s: float = option(
        default=5.0,
        unit="seconds",
        above=0,
        help="How long a request waits until the peer has looked up its tokens. Then it is computed.",
    )
    load_timeout_s: float = option(
        default=10.0,
        unit="seconds",
        above=0,
        help="How long a step waits for its loads. Loads that take longer fail, and their tokens are"
        " computed.",
    )
