"""Which lanes UCX reads through, how fast they are, and why they are slow."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

import attrs

_INTERFACE: Final = re.compile(r"\btcp/([\w.@-]+)")
_SHARED: Final = ("cma/", "sysv/", "posix/", "xpmem/", "knem/")
_SMALL_SHM: Final = 64 << 20
_PTRACE: Final = Path("/proc/sys/kernel/yama/ptrace_scope")
_NET: Final = Path("/sys/class/net")
_SHM: Final = "/dev/shm"  # noqa: S108 - it is looked at


@attrs.frozen(kw_only=True)
class Lanes:
    """What carries the reads of one end of a pipe."""

    text: str
    """In the words of UCX; "unknown" where it was loaded before kvplug could listen to it."""
    gb_per_s: float
    """Measured when the pipe began: reads of 1 MiB, in 10^9 bytes per second."""
    need_help: bool
    """Reads do not go on while the peer does nothing."""
    error_handling: str
    """UCX's mode for endpoints: "none" or "peer"."""
    tls: str
    """The transports that UCX was allowed; empty: all."""
    one_host: bool
    """Both ends are on one host."""

    def reason(self) -> str:
        """Why they may be slow, as far as this process can see: the cause, and what to change."""
        if self.one_host and not any(each in self.text for each in _SHARED):
            return self._no_shared_memory()
        for name in _INTERFACE.findall(self.text):
            if name != "lo":
                return _speed_of(name)
        return "UCX names no slow lane: one of the hosts was busy, or a GPU is far from the network card"

    def _no_shared_memory(self) -> str:
        if self.tls and not re.search(r"\b(all|sm|shm|cma|posix|sysv|xpmem)\b", self.tls):
            return f"both ends are on one host, and UCX_TLS={self.tls} leaves UCX no shared memory"
        if self.error_handling == "peer":
            return (
                "both ends are on one host, and UCX gives up shared memory for its error handling"
                " (error_handling is 'peer'); set error_handling to 'none' at both ends, since the pipe"
                " notices itself when its peer is gone"
            )
        if _number(_PTRACE) > 0:
            return (
                "both ends are on one host, and kernel.yama.ptrace_scope forbids one process to read"
                " another's memory; set it to 0, or use a pipe 'shm'"
            )
        room = os.statvfs(_SHM) if os.path.isdir(_SHM) else None
        if room is not None and room.f_bavail * room.f_frsize < _SMALL_SHM:
            return f"both ends are on one host, and {_SHM} has no room for UCX's shared memory; enlarge it"
        return (
            "both ends are on one host, and UCX uses no shared memory: they may be in containers of their"
            " own; let these share the IPC and PID namespaces"
        )


def _speed_of(interface: str) -> str:
    mbit = _number(_NET / interface / "speed")
    speed = f", which runs at {mbit} Mbit/s" if mbit > 0 else ""
    return (
        f"UCX reads through TCP on the interface {interface}{speed}; name a faster one in UCX_NET_DEVICES, or"
        " see why it found no RDMA"
    )


def _number(path: Path) -> int:
    """0 where there is none."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
