"""Where a libnccl may be: a path that was given, the package that we depend on, what torch loads."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import attrs

from kvplug.transport import NamedExhaustion

VARIABLE: Final = "KVPLUG_NCCL_LIBRARY"
PACKAGE: Final = "nvidia-nccl-cu12"
SONAME: Final = "libnccl.so.2"
_DESCRIPTORS: Final = 8
"""The loader's search runs other programs."""


@attrs.frozen
class Place:
    """``what`` names the place. Either ``path`` is to be loaded, or ``missing`` says why there is no path."""

    what: str
    path: str = ""
    missing: str = ""


def places(named: str = "") -> Iterator[Place]:
    """Yield the places in the order in which they are tried. A given path, or the variable, is the only one.

    Raises:
        ResourceExhaustedError: this process has no descriptor to look. Python would remember for good that
            there is nothing in a folder that it could not list.
    """
    if named:
        yield Place("the path that was given", named)
    elif named := os.environ.get(VARIABLE, ""):
        yield Place(VARIABLE, named)
    else:
        NamedExhaustion.ensure_available("looking for NCCL", descriptors=_DESCRIPTORS)
        yield _package()
        yield _mapped()
        yield from _beside_torch()
        yield Place("the system's loader", SONAME)


def _package() -> Place:
    what = f"the package {PACKAGE}"
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return Place(what, missing="it is not installed")
    for file in distribution.files or ():
        if file.name == SONAME:
            return _file(f"{what} {distribution.version}", Path(str(distribution.locate_file(file))))
    return Place(f"{what} {distribution.version}", missing=f"it has no {SONAME}")


def _mapped() -> Place:
    """The one that this process has loaded already: torch's, once torch was imported."""
    what = "what this process has loaded"
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError as e:
        NamedExhaustion.check(e, "looking for NCCL")
        return Place(what, missing=f"it cannot be read: {e}")
    for line in lines:
        path = line.partition("/")[2]
        if path.rpartition("/")[2].startswith("libnccl.so"):
            return _file(what, Path(f"/{path}"))
    return Place(what, missing="it includes no NCCL")


def _beside_torch() -> Iterator[Place]:
    """The one of PyTorch's wheels: in themselves, or in another package of NVIDIA's."""
    what = "PyTorch's own"
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        yield Place(what, missing="PyTorch is not installed")
        return
    torch = Path(spec.submodule_search_locations[0])
    yield _file(what, torch / "lib" / SONAME)
    yield _file(what, torch.parent / "nvidia" / "nccl" / "lib" / SONAME)


def _file(what: str, path: Path) -> Place:
    if path.is_file():
        return Place(what, str(path))
    return Place(what, missing=f"{path} is not there")
