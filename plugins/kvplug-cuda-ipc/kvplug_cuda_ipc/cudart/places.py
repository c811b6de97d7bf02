"""Where a CUDA runtime may be: at a given path, loaded by PyTorch, or in the system."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvplug.transport import NamedExhaustion

VARIABLE: Final = "KVPLUG_CUDART_LIBRARY"
SONAMES: Final = ("libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0")
_MAPS: Final = Path("/proc/self/maps")


def places(named: str = "") -> Iterator[tuple[str, str]]:
    """(description, what to load), in the order in which they are tried. A given path is the only one."""
    if named:
        yield "the path that was given", named
    elif named := os.environ.get(VARIABLE, ""):
        yield VARIABLE, named
    else:
        # PyTorch's first: two runtimes in one process each have their own current device.
        for path in loaded():
            yield "what this process has loaded", path
        for soname in SONAMES:
            yield "the system's loader", soname


def loaded(maps: Path = _MAPS) -> list[str]:
    """The runtimes that this process has mapped: PyTorch's, once torch was imported.

    Raises:
        ResourceExhaustedError: this process has no descriptor to look.
    """
    try:
        lines = maps.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError as e:
        NamedExhaustion.check(e, "looking for a CUDA runtime")
        return []
    paths = ("/" + line.partition("/")[2] for line in lines if "/" in line)
    return list(dict.fromkeys(path for path in paths if path.rpartition("/")[2].startswith("libcudart.so")))
