"""Doors: packages whose public names are imported when they are first asked for.

The names of a door stand once, in its stub ``__init__.pyi``: type checkers read it, and so does Python, when
the first name is asked for. ``import kvplug`` costs nothing, and ``from kvplug import Config`` loads what
Config needs and no more.
"""

from __future__ import annotations


class Door:
    """The names of one package, to be its ``__getattr__`` (PEP 562)."""

    def __init__(self, package: str, folder: str) -> None:
        self._package = package
        self._folder = folder
        self._homes: dict[str, str] = {}

    def homes(self) -> dict[str, str]:
        """Each name, and the module that it comes from."""
        if not self._homes:
            import re

            with open(f"{self._folder}/__init__.pyi", encoding="utf-8") as stub:
                blocks = re.findall(r"^from (\S+) import \((.*?)\)", stub.read(), re.M | re.S)
            self._homes = {
                name: module for module, names in blocks for name in re.findall(r"(\w+) as \1,", names)
            }
        return self._homes

    def __call__(self, name: str) -> object:
        if name == "__all__":
            return list(self.homes())
        module = None if name.startswith("__") else self.homes().get(name)
        if module is None:
            raise AttributeError(f"module {self._package!r} has no attribute {name!r}")
        import importlib
        import sys

        found: object = getattr(importlib.import_module(module), name)
        setattr(sys.modules[self._package], name, found)
        return found

    def names(self) -> list[str]:
        """For ``__dir__``: also what stands in the module itself."""
        import sys

        return sorted({*vars(sys.modules[self._package]), *self.homes()})
