"""Options of the pipe "cpu". Light: imported by ``kvplug list``."""

from __future__ import annotations

from typing import Literal

import attrs

from kvplug.transport import option


@attrs.frozen(kw_only=True)
class CpuOptions:
    """Sockets and buffers of the pipe "cpu"."""

    socket: Literal["auto", "unix", "tcp"] = option(
        default="auto",
        help="Sockets to listen at. unix: an abstract Unix socket, for peers on this host only. tcp: TCP."
        " auto: a Unix socket, and TCP too if the host is not a loopback address.",
    )
    connections: int = option(
        default=2,
        unit="connections",
        at_least=1,
        at_most=8,
        help="Connections per pipe that carry tensors. More can raise the throughput of large tensors and"
        " take more CPU. The lower value of the two ends is used.",
    )
    split_bytes: int = option(
        default=1024 * 1024,
        unit="bytes",
        at_least=1,
        help="Tensors of this size or larger are split over all connections. Smaller ones use one"
        " connection.",
    )
    max_in_flight_bytes: int = option(
        default=256 * 1024 * 1024,
        unit="bytes",
        at_least=1,
        help="send_tensor blocks while more unsent bytes than this are queued. Higher lets the sender run"
        " further ahead. A single larger message is sent alone.",
    )
    socket_buffer_bytes: int = option(
        default=0,
        unit="bytes",
        at_least=0,
        help="Size of the send and the receive buffer of each socket. 0: the kernel's choice, and on loopback"
        " TCP the measured optimum.",
    )
