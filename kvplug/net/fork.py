"""Forked children close what they inherited, and never share a stream with their parent.

A forked child has the parent's descriptors but none of its threads. Two processes that read one
stream would each get half of it, so everything of kvplug that owns descriptors registers here.
"""

from __future__ import annotations

import logging
import os
from typing import Final, Protocol

from kvplug.net.live_objects import LiveObjects

logger = logging.getLogger(__name__)


class Inherited(Protocol):
    """An object that owns descriptors."""

    def _after_fork_in_child(self) -> None:
        """Close the descriptors and mark the object closed; later calls raise ``ClosedError``.

        It must take no lock made before the fork (another thread of the parent may have held it),
        must not shut sockets down (the parent still uses them) and must not change an epoll set,
        which is shared with the parent too: closing descriptors is all that is safe.
        """


_registered: Final = LiveObjects[Inherited]()


def close_after_fork(thing: Inherited) -> None:
    """Call ``thing._after_fork_in_child()`` in every forked child, as long as ``thing`` lives."""
    _registered.add(thing)


def _in_child() -> None:
    inherited = _registered.all()
    _registered.clear()
    for thing in inherited:
        try:
            thing._after_fork_in_child()
        except Exception:
            logger.exception("closing %r in a forked child failed", type(thing).__name__)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
