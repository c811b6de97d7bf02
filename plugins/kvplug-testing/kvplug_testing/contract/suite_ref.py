"""Recreates a suite in another process, from plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvplug.transport import Kind
from kvplug_testing.sources import at_source


def suite_from_ref(suite_ref: Mapping[str, Any]) -> Any:
    """The suite that :meth:`.Contract.suite_ref` describes, made in another process."""
    cls, said = at_source(suite_ref["source"]), dict(suite_ref["attributes"])
    if suite_ref["around"]:  # it makes the subject, and this makes the suite
        cls, said = at_source(suite_ref["around"])(suite_ref["kind"], cls, **said), {}
    said |= {"transport": suite_ref["transport"], "options": suite_ref["options"]}
    return type(cls.__name__, (cls,), said)()


def at_source(source: str) -> Any:
    """The class or function that ``"FILE.py:NAME"`` or ``"MODULE:NAME"`` names."""
    path, _, name = source.rpartition(":")
    found: Any = module_at(path) if path.endswith(".py") else importlib.import_module(path)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def source_of(thing: Any) -> str:
    """What :func:`at_source` finds a class or function by; empty if it is not at the top level of a file."""
    file = getattr(sys.modules.get(getattr(thing, "__module__", "")), "__file__", None)
    name = getattr(thing, "__qualname__", "<unnamed>")
    return f"{os.path.abspath(file)}:{name}" if file and "<" not in name else ""


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


def name_of(what: Callable[..., Any]) -> str:
    """A function of a module's top level as text, for :func:`named` in another process."""
    return f"{what.__module__}:{what.__qualname__}"


def named(name: str) -> Callable[..., Any]:
    """The function that :func:`name_of` names."""
    module, _, function = name.rpartition(":")
    return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]
