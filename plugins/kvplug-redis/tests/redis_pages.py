"""Stores "redis" and pages for them, also in processes that tests start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kvplug import Config, build_store
from kvplug.transport import Store
from kvplug_lab.named_pages import NamedPages
from kvplug_redis import store as stores
from kvplug_testing.peers import Parent

PIECE = 4096
PAGES = NamedPages(10 * PIECE + 77)
request, put, got = PAGES.request, PAGES.put, PAGES.got


def opened(address: str | list[str], **options: Any) -> Store:
    given = {"address": [address] if isinstance(address, str) else address, "piece_bytes": PIECE, **options}
    config = {"stores": ["redis"], "timeout_s": 10, "options": {"redis": {"timeout_s": 1, **given}}}
    return build_store(Config.from_dict(config))


def before_piece(number: int, act: Callable[[], None]) -> Any:
    """What cuts pages into pieces, and acts once, before the store writes that piece."""
    cut, written = stores.cut, 0

    def acting(parts: Any, nbytes: int) -> Iterator[Any]:
        nonlocal written
        for group in cut(parts, nbytes):
            written += 1
            if written == number + 1:
                act()
            yield group

    return acting


def dying_writer(parent: Parent, address: str) -> None:
    """Write five pieces of a page, and wait to be killed."""

    def wait() -> None:
        parent.send("half")
        parent.recv(timeout=None)

    stores.cut = before_piece(5, wait)
    put(opened(address, size=10 << 20), "a")
