"""Options of the pipe "cpu". Light: imported by ``kvplug list``."""

from __future__ import annotations

from typing import Literal

import attrs

from kvplug.transport import option


@attrs.frozen(kw_only=True)
class CpuOptions:
    """How the pipe "cpu" connects, and how much it holds."""

    socket: Literal["auto", "unix", "tcp"] = option(
        default="auto",
        help="What to listen on. auto: an abstract Unix socket for peers on this host, and TCP as well when"
        " the host is not a loopback address.",
    )
    connections: int = option(
        default=2,
        unit="connections",
        at_least=1,
        at_most=8,
        help="Connections that carry tensors; the smaller number of the two ends counts.",
    )
    split_bytes: int = option(
        default=1024 * 1024,
        unit="bytes",
        at_least=1,
        help="Tensors of this size and more are sent over all connections at once.",
    )
    max_in_flight_bytes: int = option(
        default=256 * 1024 * 1024,
        unit="bytes",
        at_least=1,
        help="Unsent bytes that send_tensor queues before it blocks. One larger message passes alone.",
    )
    socket_buffer_bytes: int = option(
        default=0,
        unit="bytes",
        at_least=0,
        help="Size of each socket's buffers; 0 leaves them to the kernel (and, on loopback TCP, to what"
        " was measured to be fastest).",
    )
