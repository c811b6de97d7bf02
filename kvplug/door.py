"""Imports the public names of a package on first use.

The package lists these names only in its stub ``__init__.pyi``. Type checkers read the stub, and
:class:`Door` reads it when a name is first used. So ``import kvplug`` is cheap, and ``from kvplug import
Config`` loads only the modules that Config needs.
"""

from __future__ import annotations


class Door:
    """Imports the names of one package. Serves as the package's ``__getattr__`` (PEP 562)."""

    def __init__(self, package: str, folder: str) -> None:
        self._package = package
        self._folder = folder
        self._homes: dict[str, str] = {}

    def homes(self) -> dict[str, str]:
        """Return each name with the module that defines it."""
        if not self._homes:
            homes, module = {}, ""
            with open(f"{self._folder}/__init__.pyi", encoding="utf-8") as stub:
                for words in map(str.split, stub):
                    if words[:1] == ["from"]:
                        module = words[1]
                    elif words[1:2] == ["as"]:
                        homes[words[0]] = module
            self._homes = homes
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
        """Return the names for ``__dir__``, including those defined in the package itself."""
        import sys

        return sorted({*vars(sys.modules[self._package]), *self.homes()})
