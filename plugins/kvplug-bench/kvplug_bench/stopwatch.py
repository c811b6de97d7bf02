"""Seconds, CPU seconds and page faults of one process."""

from __future__ import annotations

import resource
import time
from typing import Any

from kvplug_bench.device import BURST_BYTES

MOST_IN_BURST = 256
WARM_BURSTS = 2
TIMED_BURSTS = 5
PAUSE_S = 0.1
"""The pause before a message of the op "alone": long enough that both ends sleep."""
BURSTS = WARM_BURSTS + TIMED_BURSTS


def in_burst(nbytes: int, burst_bytes: int = BURST_BYTES) -> int:
    """The number of messages of a size that are timed together, so that the answer's time is negligible."""
    return max(1, min(MOST_IN_BURST, burst_bytes // nbytes))


class Stopwatch:
    """Times bursts. The first :data:`WARM_BURSTS` warm up and do not count."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._cpu: list[float] = []
        self._faults: list[int] = []

    def start(self) -> None:
        self._began_faults = _faults()
        self._began_cpu = time.process_time()
        self._began = time.perf_counter()

    def stop(self) -> None:
        self._seconds.append(time.perf_counter() - self._began)
        self._cpu.append(time.process_time() - self._began_cpu)
        self._faults.append(_faults() - self._began_faults)

    def plain(self) -> dict[str, Any]:
        """Seconds of each counted burst; CPU seconds (user and system) and page faults of all counted
        bursts.
        """
        return {
            "seconds": self._seconds[WARM_BURSTS:],
            "cpu_s": sum(self._cpu[WARM_BURSTS:]),
            "faults": sum(self._faults[WARM_BURSTS:]),
        }


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
