"""Options and probe of the transports "memory". No torch here."""

from __future__ import annotations

import os
import uuid

import attrs

from kvplug.transport import Probe, option

_THIS_PROCESS = uuid.uuid4().hex


@attrs.frozen(kw_only=True)
class MemoryPipeOptions:
    """Options of the pipe "memory"."""

    max_in_flight_bytes: int = option(
        default=64 * 1024 * 1024,
        unit="bytes",
        at_least=1,
        help="Bytes that wait to be received before send_tensor blocks. One larger message passes alone.",
    )
    eager: bool = option(
        default=True,
        help="Copy a tensor when it is sent. Otherwise it is copied when it is received, which ends its"
        " transfer.",
    )


@attrs.frozen(kw_only=True)
class MemoryStoreOptions:
    """Options of the store "memory"."""

    path: str = option(
        default="",
        help="Ends in this process with the same path share their pages. Empty: pages of its own.",
    )


def describe() -> Probe:
    """The probe. It reaches only this process; a forked child is another process."""
    return Probe(domain=f"{_THIS_PROCESS} {os.getpid()}")
