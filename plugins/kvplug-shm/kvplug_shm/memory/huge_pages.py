"""Whether memory of this process lies in huge pages, as the kernel says (PAGEMAP_SCAN, since Linux 6.7)."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
from typing import Final

# linux/fs.h: _IOWR('f', 16, struct pm_scan_arg), and one of the categories of pages.
_PAGEMAP_SCAN: Final = 0xC0606610
_IS_HUGE: Final = 1 << 6
_ARG: Final = struct.Struct("<12Q")


class _Region(ctypes.Structure):
    """Pages of one kind that lie side by side (struct page_region)."""

    _fields_ = (("start", ctypes.c_uint64), ("end", ctypes.c_uint64), ("categories", ctypes.c_uint64))


_Regions = _Region * 64
"""As many as are told of at once. Memory in more pieces is not worth the question."""


def in_huge_pages(address: int, nbytes: int) -> bool:
    """Whether most of the ``nbytes`` at ``address`` is; no, where the system does not tell.

    Takes some microseconds, and longer the more small pages there are.
    """
    begin = address & -mmap.PAGESIZE
    end = (address + nbytes + mmap.PAGESIZE - 1) & -mmap.PAGESIZE
    regions = _Regions()
    # size, flags, start, end, walk_end, vec, vec_len, max_pages, then four masks: inverted, all of, any of,
    # returned.
    asked = (_ARG.size, 0, begin, end, 0, ctypes.addressof(regions), len(regions), 0)
    argument = bytearray(_ARG.pack(*asked, 0, _IS_HUGE, 0, _IS_HUGE))
    try:
        fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        found = fcntl.ioctl(fd, _PAGEMAP_SCAN, argument)
    except OSError:
        return False
    finally:
        os.close(fd)
    huge = sum(regions[each].end - regions[each].start for each in range(found))
    return huge * 4 >= (end - begin) * 3
