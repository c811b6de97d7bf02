"""What UCX logs of the lanes that it has chosen, kept in memory."""

from __future__ import annotations

import ctypes
import os
import re
import threading
from typing import Final

from kvplug.transport import Memfd

_LANES: Final = re.compile(r" (?:intra|inter)-node cfg#\d+ (.*)$")


class UcxLog:
    """A log file without a name. UCX opens it when it is loaded."""

    def __init__(self) -> None:
        """Raises ResourceExhaustedError: there is no descriptor for it."""
        self._fd = Memfd.create("kvplug-ucx-log", 0)
        self._lock = threading.Lock()
        self.settings: Final = {
            "UCX_LOG_LEVEL": "info",
            "UCX_LOG_FILE": f"/proc/self/fd/{self._fd}",
        }
        """Environment variables for the time in which UCX is loaded."""

    def lanes_of(self, agent: str) -> str:
        """Return the lanes of an agent to its peer, as ``rma(rc_mlx5/mlx5_0:1) am(rc_mlx5/mlx5_0:1)``."""
        ctypes.CDLL(None).fflush(
            None
        )  # UCX writes through a stream of the C library, whose name is not known
        with self._lock:
            size = os.fstat(self._fd).st_size
            text = os.pread(self._fd, size, 0).decode(errors="replace")
        found = ""
        for line in text.splitlines():
            if agent in line and (match := _LANES.search(line)):
                found = " ".join(match[1].split())
        return found
