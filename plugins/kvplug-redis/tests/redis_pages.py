"""Stores "redis" and pages for them, also in processes that tests start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvplug import Config, build_store
from kvplug.transport import Store
from kvplug_lab.named_pages import NamedPages
from kvplug_redis.replies import ReplyConnection
from kvplug_testing.peers import Parent

PIECE = 4096
_SET = b"*5\r\n$3\r\nSET\r\n"
"""How a command begins that writes a piece."""
PAGES = NamedPages(10 * PIECE + 77)
request, put, got = PAGES.request, PAGES.put, PAGES.got


def opened(address: str | list[str], **options: Any) -> Store:
    given = {"address": [address] if isinstance(address, str) else address, "piece_bytes": PIECE, **options}
    config = {"stores": ["redis"], "timeout_s": 10, "options": {"redis": {"timeout_s": 1, **given}}}
    return build_store(Config.from_dict(config))


def before_piece(number: int, act: Callable[[], None]) -> Any:
    """What sends commands, and acts once, when all pieces of a page before that one were sent."""
    send, has_acted = ReplyConnection.send_packed_command, False

    def acting(connection: Any, buffers: Any, **given: Any) -> None:
        nonlocal has_acted
        *before, rest = b"".join(buffers).split(_SET, number + 1)
        if not has_acted and len(before) > number:
            has_acted = True
            send(connection, [_SET.join(before)], **given)
            act()
            buffers = [_SET + rest]
        send(connection, buffers, **given)

    return acting


def dying_writer(parent: Parent, address: str) -> None:
    """Write five pieces of a page, and wait to be killed."""

    def wait() -> None:
        parent.send("half")
        parent.recv(timeout=None)

    ReplyConnection.send_packed_command = before_piece(5, wait)
    put(opened(address, size=10 << 20), "a")
