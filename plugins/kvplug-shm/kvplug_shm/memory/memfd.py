"""The kernel's anonymous memory, by descriptor. Light: the probe imports it."""

from __future__ import annotations

import errno
import os
from typing import Final

_NOEXEC_SEAL: Final = 0x8
"""MFD_NOEXEC_SEAL, since Linux 6.3: an administrator may refuse memory that could be executed."""


def new(name: str) -> int:
    """The descriptor of new memory of size 0, which can be sealed; close-on-exec.

    Raises:
        OSError: the system cannot create it.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _NOEXEC_SEAL)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
    return os.memfd_create(name, flags)
