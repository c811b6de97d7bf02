"""Segments that a device's driver has pinned, so that the device copies straight into them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvplug.transport import JobEngine
from kvplug_host.arena.segments import Segments

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)


class PinnedSegments:
    """Pins segments in the store's threads, each when its memory is first wanted for a device.

    It takes long, like the first use of as much memory; what is wanted meanwhile is staged.
    """

    def __init__(self, segments: Segments, jobs: JobEngine) -> None:
        self._segments = segments
        self._jobs = jobs
        self._lock = threading.Lock()
        self._pinned: dict[tuple[str, int], bool] = {}
        """Whether each segment that was wanted for a kind of device is pinned by now."""
        self._refusing: set[str] = set()
        """Kinds of devices for which memory cannot be pinned."""

    def has(self, number: int, device: torch.device) -> bool:
        """Whether the device may copy into the segment. If not, it may be so later. Does not wait."""
        wanted = device.type, number
        with self._lock:
            is_new = wanted not in self._pinned and device.type not in self._refusing
            is_pinned = self._pinned.setdefault(wanted, False)
        if is_new and not self._jobs.add(_Call(lambda: self._pin(number, device))):
            with self._lock:
                del self._pinned[wanted]
        return is_pinned

    def _pin(self, number: int, device: torch.device) -> None:
        if device.type in self._refusing:
            return
        try:
            self._segments.pin(number, device)
        except Exception as e:
            with self._lock:
                is_first = device.type not in self._refusing
                self._refusing.add(device.type)
            if is_first:
                _log.warning("pages on %s are staged, since the store's memory is not pinned: %s", device, e)
            return
        with self._lock:
            self._pinned[device.type, number] = True


class _Call(JobEngine.Steps):
    """A single step, which calls a function."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def next_step(self) -> int | None:
        return 0 if self.has_steps() else None

    def has_steps(self) -> bool:
        return self._call is not None

    def run(self, step: int) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()
