"""Options of the connector "p2p"."""

from __future__ import annotations

import attrs

from kvplug.transport import option


@attrs.frozen(kw_only=True)
class P2POptions:
    """How the connector "p2p" keeps blocks for other engines, and pulls blocks from them."""

    async_load: bool = option(
        default=True,
        help="Pull KV in the background, while the engine computes other requests. False: pull it layer by"
        " layer in the step that needs it.",
    )
    lease_s: float = option(
        default=30.0,
        unit="seconds",
        above=0,
        help="How long a producer keeps the blocks of a finished prompt for an engine that does not ask for"
        " them. After a decode engine has asked, they are kept until it has pulled them or has gone, or until"
        " it or one of its workers has made no progress for timeout_s.",
    )
    wait_timeout_s: float = option(
        default=2.0,
        unit="seconds",
        above=0,
        help="How long a new request waits for the producer's answer before it is computed (and counted).",
    )
    stall_timeout_s: float = option(
        default=5.0,
        unit="seconds",
        above=0,
        help="A pull fails if it receives nothing for this long. Keep it much lower than timeout_s: with"
        " async_load = false the engine's step waits for the pull.",
    )
    allowed: tuple[str, ...] = option(
        default=(),
        help="Addresses of producers that a request may name besides those in `peers`, as patterns such as"
        ' "10.0.7.*:29555"; * matches letters, digits, - and _. kvplug never connects to other addresses.',
    )
