"""Options of the store "host". Light: imported by ``kvplug list``."""

from __future__ import annotations

from typing import Any

import attrs

from kvplug.transport import Address, option


def _path(_: Any, __: Any, value: str) -> None:
    if value and not value.startswith("/"):
        raise ValueError("allowed is an absolute path")
    if value:
        Address.parse_server(f"unix:{value}")


def _contact(_: Any, __: Any, value: str) -> None:
    if value:
        Address.parse_server(value)


@attrs.frozen(kw_only=True)
class HostOptions:
    """Memory of the store "host", and how others reach it."""

    size: int | None = option(
        None,
        unit="bytes",
        at_least=4096,
        takes_memory=True,
        help="Memory for pages, headers and waste included. Rounded down to whole segments. none: the"
        " config's buffer_size.",
    )
    segment_bytes: int = option(
        64 * 1024 * 1024,
        unit="bytes",
        at_least=4096,
        help="Size of one segment of the memory. Pages of one size share a segment or an eighth of it, so a"
        " page should fit some thirty times into a segment. At most size.",
    )
    threads: int = option(
        2,
        unit="threads",
        at_least=1,
        at_most=64,
        help="Threads that copy pages. They start when they are needed.",
    )
    map: bool = option(
        True,
        help="Whether processes of the same user and host may map the memory and read it themselves, and lend"
        " 32 MiB of theirs for the pages that they put. false: pages go over a pipe, as to other hosts.",
    )
    socket: str = option(
        "",
        validator=_path,
        help="Path of the Unix socket over which the memory is handed to readers, for containers that share a"
        " folder and no network namespace. Empty: an abstract socket, or a path beside that of the"
        " config's host.",
    )
    contact: str = option(
        "",
        validator=_contact,
        help="Address or contact of a store that `kvplug store serve` serves. This process then keeps no"
        " pages itself and uses that one. Empty: a store in this process.",
    )
