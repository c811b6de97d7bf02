"""How a mutant is made: a suite of the conformance kit, and one part of its subject with a fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def breaks(suite: type[Any], *laws: str) -> Callable[[type[Any]], type[Any]]:
    """The decorated class is the faulty part, derived from one of the classes in ``suite.parts``.

    What it decorates becomes a class that is judged: ``suite`` with that part in the place of the right one.
    """

    def mutant(part: type[Any]) -> type[Any]:
        (name,) = [name for name in suite.parts if issubclass(part, getattr(suite, name))]
        made = {"__doc__": part.__doc__, "__module__": part.__module__, "breaks": laws, name: part}
        return type(part.__name__, (suite,), made)

    return mutant
