"""Waiting for what only looking shows: a read of UCX's, or a device that reaches a mark."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvplug import KvplugError, TransportError
from kvplug.transport import Deadline, DeviceMark

if TYPE_CHECKING:
    from torch import device

_PAUSE_S: Final = (50e-6, 1e-3)
"""How long a call sleeps between two looks: at first, and at most."""


def poll(is_done: Callable[[], bool], check: Callable[[], None], deadline: Deadline) -> bool:
    """Whether it is done before the deadline. ``check``, called between two looks, raises to end the wait."""
    pause, longest = _PAUSE_S
    spin_until = time.monotonic() + pause
    while not is_done():
        check()
        if deadline.expired:
            return False
        if time.monotonic() > spin_until:
            time.sleep(pause)
            pause = min(2 * pause, longest)
    return True


def poll_device(on: device, check: Callable[[], None], deadline: Deadline) -> bool:
    """Whether a device does all that the thread's current stream was given, before the deadline.

    Raises:
        TransportError: the device failed. ``check`` raises others.
    """
    try:
        mark = DeviceMark(on)
        return poll(lambda: mark.is_passed, check, deadline)
    except KvplugError:
        raise
    except RuntimeError as e:
        raise TransportError(f"{on} failed: {e}") from e
