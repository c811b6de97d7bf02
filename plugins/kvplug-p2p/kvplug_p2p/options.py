"""Options of the connector "p2p"."""

from __future__ import annotations

import attrs

from kvplug.transport import option


@attrs.frozen(kw_only=True)
class P2POptions:
    """How the connector "p2p" keeps blocks for other engines, and pulls theirs."""

    async_load: bool = option(
        default=True,
        help="Pull KV in the background, while the engine computes other requests. False: in the step that"
        " needs it, layer by layer.",
    )
    lease_s: float = option(
        default=30.0,
        unit="seconds",
        above=0,
        help="How long a producer keeps the blocks of a finished prompt for an engine that does not ask for"
        " them. A decode engine that has asked keeps them until it has pulled them or has gone, or until it"
        " or one of its workers has made no progress for timeout_s.",
    )
    wait_timeout_s: float = option(
        default=2.0,
        unit="seconds",
        above=0,
        help="How long a new request waits for the producer's answer. Then it is computed (and counted).",
    )
    stall_timeout_s: float = option(
        default=5.0,
        unit="seconds",
        above=0,
        help="A pull that has received nothing for so long has failed. Much less than timeout_s: with"
        " async_load = false the engine's step waits for it.",
    )
    allowed: tuple[str, ...] = option(
        default=(),
        help="Addresses of producers that a request may name beside those in `peers`, as patterns such as"
        ' "10.0.7.*:29555"; * stands for letters, digits, - and _. No other address is ever dialled.',
    )
