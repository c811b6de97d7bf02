"""Modules that SGLang imports and does not use for text on a CPU.

Every name in them is a class, which cannot be called. The packages beside this file are such modules: they
stand for packages that need a GPU, or another build of torch.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

PACKAGES = ("sgl_kernel", "torchaudio", "torchvision")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module inside the packages."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        fill(module)


class Absent(type):
    """The type of what such a module contains: a class, so that others can derive from it."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return make(f"{cls.__module__}.{cls.__name__}", name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.__dict__.get("_is_stub"):
            raise NotImplementedError(
                f"{cls.__module__}.{cls.__name__} is a stub: it needs a GPU, or another torch"
            )
        return super().__call__(*args, **kwargs)


def make(module: str, name: str) -> Absent:
    return Absent(name, (), {"__module__": module, "_is_stub": True})


def fill(module: ModuleType) -> None:
    def find(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return make(module.__name__, name)

    module.__getattr__ = find  # type: ignore[method-assign]


def install() -> None:
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())
