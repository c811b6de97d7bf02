"""Segments that a device's driver has pinned, so that the device copies straight into them."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from kvplug.transport import JobEngine
from kvplug_host.arena.segments import Segments

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)


class PinnedSegments(JobEngine.Steps):
    """Pins segments in the store's threads, each when its memory is first wanted for a device.

    It takes long, like the first use of as much memory; pages that need it meanwhile are staged. Segments are
    pinned one at a time, in turns with the store's jobs.
    """

    def __init__(self, segments: Segments, jobs: JobEngine) -> None:
        self._segments = segments
        self._jobs = jobs
        self._lock = threading.Lock()
        self._pinned: set[tuple[str, int]] = set()
        """The kinds of devices and the segments that are pinned for them."""
        self._wanted: dict[tuple[str, int], torch.device] = {}
        """Those that are to be pinned."""
        self._refusing: set[str] = set()
        """Kinds of devices for which memory cannot be pinned."""
        self._is_pinning = False

    def has(self, number: int, device: torch.device) -> bool:
        """Whether the device may copy into the segment. If not, it may be so later. Does not wait."""
        with self._lock:
            if (device.type, number) in self._pinned:
                return True
            is_new = (device.type, number) not in self._wanted and device.type not in self._refusing
            if is_new:
                self._wanted[device.type, number] = device
        if is_new:
            self._jobs.add(self)
        return False

    def next_step(self) -> int | None:
        if not self.has_steps():
            return None
        self._is_pinning = True
        return 0

    def has_steps(self) -> bool:
        return bool(self._wanted) and not self._is_pinning

    def run(self, step: int) -> None:
        with self._lock:
            (kind, number), device = next(iter(self._wanted.items()))
        try:
            self._segments.pin(number, device)
        except Exception as e:
            _log.warning("pages on %s are staged, since the store's memory is not pinned: %s", device, e)
            with self._lock:
                self._refusing.add(kind)
                self._wanted = {each: of for each, of in self._wanted.items() if each[0] != kind}
        else:
            with self._lock:
                self._pinned.add((kind, number))
                del self._wanted[kind, number]
        self._is_pinning = False
        if self._wanted:
            self._jobs.add(self)
