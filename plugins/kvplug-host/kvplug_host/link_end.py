"""The end of a link, in a thread that sends or receives."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

from kvplug import ClosedError, KvplugError, PeerGoneError

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def failing(fail: Callable[[str | None], object], what: str) -> Iterator[None]:
    """If the block raises, call ``fail``, since the link has to end: with ``what`` and the error, or with
    ``None`` if the peer is gone."""
    try:
        yield
    except (PeerGoneError, ClosedError):
        fail(None)
    except KvplugError as e:
        fail(f"{what}: {e}")
    except Exception as e:
        _log.exception("%s: a fault of kvplug", what)
        fail(f"{what}: {e}")
