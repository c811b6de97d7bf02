"""Options: everything ``kvplug list`` needs beside the plugin's own module. No torch here."""

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
        help="A request whose tokens the peer has not looked up by then is computed.",
    )
    load_timeout_s: float = option(
        default=10.0,
        unit="seconds",
        above=0,
        help="The loads of one step that have not ended by then have failed, and their tokens are computed."
        " The whole step waits for them.",
    )
