"""How a mutant is made: a suite of the conformance kit, and one part of its subject with a fault."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

from kvplug.engine import ConnectorSpec
from kvplug_testing import ConnectorContract


def breaks(suite: type[Any], *laws: str) -> Callable[[type[Any]], type[Any]]:
    """The decorated class is the faulty part, derived from one of the classes in ``suite.parts``.

    What it decorates becomes a class that is judged: ``suite`` with that part in the place of the right one.
    """

    def mutant(part: type[Any]) -> type[Any]:
        (name,) = [name for name in suite.parts if issubclass(part, getattr(suite, name))]
        made = {"__doc__": part.__doc__, "__module__": part.__module__, "breaks": laws, name: part}
        return type(part.__name__, (suite,), made)

    return mutant


class Sides(ConnectorContract):
    """An installed connector whose sides are made by other classes."""

    across_processes = False
    scheduler_factory: Any
    worker_factory: Any

    def make_side(self, config: Any, side: str, **given: Any) -> Any:
        made = {"load_factory": self.scheduler_factory, "load_worker_factory": self.worker_factory}
        with contextlib.ExitStack() as patches:
            for load, factory in made.items():
                patches.enter_context(mock.patch.object(ConnectorSpec, load, return_value=factory))
            return super().make_side(config, side, **given)
