"""Errors of the system, with the limit that caused them."""

from __future__ import annotations

import errno
import resource
from typing import Final

_LIMITS: Final = {
    errno.EMFILE: ("RLIMIT_NOFILE", resource.RLIMIT_NOFILE, "descriptors"),
    errno.ETOOMANYREFS: ("RLIMIT_NOFILE", resource.RLIMIT_NOFILE, "descriptors under way"),
    errno.EFBIG: ("RLIMIT_FSIZE", resource.RLIMIT_FSIZE, "bytes of a file"),
    errno.ENOMEM: ("RLIMIT_AS", resource.RLIMIT_AS, "bytes of addresses"),
}


def explain_os_error(error: BaseException) -> str:
    """The error, and the limit of this process that explains it, if one is set."""
    number = getattr(error, "errno", None)
    if number not in _LIMITS:
        return str(error)
    name, limit, unit = _LIMITS[number]
    soft, _ = resource.getrlimit(limit)
    if soft == resource.RLIM_INFINITY:
        return str(error)
    return f"{error} ({name} is {soft} {unit})"
