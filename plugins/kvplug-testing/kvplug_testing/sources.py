"""Functions and classes as text, by which another process finds them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any


def source_of(thing: Any) -> str:
    """What :func:`at_source` finds a class or function by; empty if it is not at the top level of a file."""
    file = getattr(sys.modules.get(getattr(thing, "__module__", "")), "__file__", None)
    name = getattr(thing, "__qualname__", "<unnamed>")
    return f"{os.path.abspath(file)}:{name}" if file and "<" not in name else ""


def at_source(source: str) -> Any:
    """The class or function that ``"/path/to/file.py:NAME"`` or ``"package.module:NAME"`` names."""
    path, _, name = source.rpartition(":")
    found: Any = module_at(path) if path.endswith(".py") else importlib.import_module(path)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def module_at(path: str) -> Any:
    """The module of a file: the one that this process has imported, or a new one of another name."""
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == path:
            return module
    sys.path.append(os.path.dirname(path))  # for what the file imports from beside itself
    spec = importlib.util.spec_from_file_location(f"kvplug_judged_{abs(hash(path)):x}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
