"""Recreates a suite in another process, from plain values."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from typing import Any


def suite_from_ref(suite_ref: Mapping[str, Any]) -> Any:
    """The suite that :meth:`.Contract.suite_ref` describes, made in another process."""
    path, _, name = suite_ref["source"].rpartition(":")
    if path.endswith(".py"):
        module = module_at(path)
    else:
        module = importlib.import_module(path)
    cls: Any = module
    for part in name.split("."):
        cls = getattr(cls, part)
    return type(name, (cls,), {"transport": suite_ref["transport"], "options": suite_ref["options"]})()


def module_at(path: str) -> Any:
    """The module of a test file, under its full name if the file is in an importable package."""
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == path:
            return module
    key = f"kvplug_judged_{abs(hash(path)):x}"
    spec = importlib.util.spec_from_file_location(key, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module
    spec.loader.exec_module(module)
    return module
