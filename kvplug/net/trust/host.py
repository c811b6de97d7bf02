"""What the kernel says of this host and of this process's namespaces."""

from __future__ import annotations

import functools
import os

from kvplug.net.exhaustion import raise_if_exhausted

_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def boot_id() -> str:
    """Of the running kernel: two processes with equal ones are on one host. Empty where there is none.

    Raises:
        ResourceExhaustedError: the process has no free descriptor to read it.
    """
    try:
        return _boot_id()
    except OSError as e:
        raise_if_exhausted(e, f"reading {_BOOT_ID}")
        return ""


def namespace(kind: str) -> str:
    """The namespace (``"pid"``, ``"net"``) of this process. Empty where the kernel does not show it.

    Raises:
        ResourceExhaustedError: the host has no memory left to say it.
    """
    # Not cached: a process may move to another network namespace.
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError as e:
        raise_if_exhausted(e, f"reading the namespace {kind!r}")
        return ""


@functools.cache  # of what it returns; what it raises is not kept
def _boot_id() -> str:
    with open(_BOOT_ID, encoding="utf-8") as f:
        return f.read().strip()
