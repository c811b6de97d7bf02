"""OpenMP in kvplug's threads, where it binds threads to CPUs (``GOMP_CPU_AFFINITY``, ``OMP_PROC_BIND``, ...).

A thread that first shares a loop with others through OpenMP, as torch does for a large copy, is bound by it:
by GNU's library to the first of its places, which is the CPU of the engine's main thread. Whatever affinity
the thread had chosen is gone. So there kvplug's threads share no loops; what they do is copying.
"""

from __future__ import annotations

import contextlib
import re
import sys
from typing import Any

_LIBRARY = re.compile(r"/\S*/lib(?:gomp|iomp5|omp)\b[^/\s]*\.so[^/\s]*$", re.MULTILINE)
"""GNU's, Intel's and LLVM's, in the list of mapped files."""


def share_no_loops() -> None:
    """In the calling thread, if OpenMP is loaded and binds threads. Call it before the affinity is set."""
    libraries = _loaded()
    if not libraries:
        return
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "get_num_threads"):
        torch.get_num_threads()  # when a thread first asks, torch sets the number: not after us
    for library in libraries:
        library.omp_set_num_threads(1)


def places() -> frozenset[int]:
    """The CPUs to which OpenMP binds threads; empty if it binds none.

    They are among those that the process had at its start, before OpenMP bound the main thread.
    """
    libraries = _loaded()
    if not libraries:
        return frozenset()
    import ctypes  # not before it is needed: this is imported by whatever starts a thread

    found: set[int] = set()
    for library in libraries:
        for place in range(library.omp_get_num_places()):
            cpus = (ctypes.c_int * library.omp_get_place_num_procs(place))()
            library.omp_get_place_proc_ids(place, cpus)
            found.update(cpus)
    return frozenset(found)


_known: dict[bool, list[Any]] = {}
"""The libraries that bind threads, by whether torch, which brings one, was loaded at the search."""


def _loaded() -> list[Any]:
    has_torch = "torch" in sys.modules
    if has_torch not in _known:
        _known[has_torch] = [library for library in _mapped() if _binds(library)]
    return _known[has_torch]


def _mapped() -> list[Any]:
    found = []
    with contextlib.suppress(OSError):
        with open("/proc/self/maps") as maps:
            paths = sorted(set(_LIBRARY.findall(maps.read())))
        if paths:
            import ctypes
        for path in paths:
            with contextlib.suppress(OSError):  # its file was removed since
                found.append(ctypes.CDLL(path))
    return found


def _binds(library: Any) -> bool:
    return hasattr(library, "omp_get_place_proc_ids") and bool(library.omp_get_proc_bind())
