"""Options of the store "mooncake"."""

from __future__ import annotations

import re
from typing import Any, Final, Literal

import attrs

from kvplug.transport import Address, option

_PREFIX: Final = re.compile(r"[A-Za-z0-9_./-]{1,100}")


def _prefix(_: Any, __: Any, given: str) -> None:
    if not _PREFIX.fullmatch(given):
        raise ValueError("allowed are up to 100 letters, digits and _ . / -")


def _master(_: Any, __: Any, given: str) -> None:
    if Address.parse_server(given).is_unix:
        raise ValueError("allowed is host:port")


@attrs.frozen(kw_only=True)
class MooncakeOptions:
    """Options of the store "mooncake"."""

    master: str = option(
        default="127.0.0.1:50051", help="Where mooncake_master listens: host:port.", validator=_master
    )
    prefix: str = option(
        default="kvplug",
        help="Prefix of all key names. Deployments that share a master have different ones.",
        validator=_prefix,
    )
    segment_bytes: int = option(
        default=0,
        unit="bytes",
        at_least=0,
        takes_memory=True,
        help="Memory that this process adds to the pool, for all engines, until it ends. 0: the pool has only"
        " the memory of other holders.",
    )
    landing_bytes: int = option(
        default=64 * 1024**2,
        unit="bytes",
        at_least=4096,
        takes_memory=True,
        help="Shared memory through which pages come and go. The largest page must fit, and as many pages"
        " should as lanes has.",
    )
    lanes: int = option(
        default=4,
        at_least=1,
        help="How many pages are read and written at the same time. Mooncake keeps a core busy for each.",
    )
    timeout_s: float = option(
        default=3.0,
        unit="seconds",
        at_least=1,
        help="How long a holder may take to transfer a page, and the master to answer.",
    )
    protocol: Literal["tcp", "rdma"] = option(
        default="tcp",
        help="How Mooncake moves pages. kvplug's tests cover tcp.",
    )
    devices: str = option(default="", help="Names of RDMA devices, separated by commas, for Mooncake.")
    log_file: str | None = option(
        default=None, help="File to which Mooncake's own messages are appended. None: they are discarded."
    )
