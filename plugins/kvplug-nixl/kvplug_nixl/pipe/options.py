"""Options of the pipe "nixl". Light: imported by ``kvplug list``."""

from __future__ import annotations

from typing import Literal

import attrs

from kvplug.transport import option


@attrs.frozen(kw_only=True)
class NixlPipeOptions:
    """How the pipe "nixl" uses NIXL, and what it expects of the lanes that UCX finds."""

    error_handling: Literal["auto", "none", "peer"] = option(
        default="auto",
        help="UCX's ucx_error_handling_mode. With 'peer' UCX notices that a peer is lost, and on some"
        " versions gives up shared memory for it; with 'none' the pipe notices it. 'auto': 'none' between"
        " processes that see each other, else 'peer'.",
    )
    tls: str = option(
        default="",
        help="The transports that UCX may use, as in UCX_TLS, such as 'rc,cuda' or 'tcp'. Empty: what that"
        " variable says, else all.",
    )
    expected_gb_per_s: float = option(
        default=10.0,
        at_least=0.0,
        help="What the lanes should carry, in 10^9 bytes per second. When a pipe begins it reads 1 MiB"
        " several times. If less than a tenth of this comes, then or later, the config's slow_path says what"
        " is done. 0: nothing is expected.",
    )
    inline_bytes: int = option(
        default=4096,
        unit="bytes",
        at_least=0,
        at_most=4096,
        help="Messages of up to this size travel in their announcement, without NIXL.",
    )
    max_in_flight_bytes: int = option(
        default=256 * 1024 * 1024,
        unit="bytes",
        at_least=1,
        help="send_tensor blocks while more bytes than this are sent and not yet received. A single larger"
        " message is sent alone.",
    )
