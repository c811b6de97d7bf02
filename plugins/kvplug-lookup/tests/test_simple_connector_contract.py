"""The connector "simple" keeps the laws of connectors, and its plugin those of plugins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any
from unittest import mock

from kvplug import CapacityError, TransportError
from kvplug_lookup.simple.entries import Entries
from kvplug_lookup.simple.worker import Blocks
from kvplug_testing import ConnectorContract, check_plugin

_TAKE = Blocks.layer


class TestSimple(ConnectorContract):
    connector = "simple"
    config = MappingProxyType({"buffer_size": 64 << 20})
    injects_into_own = True

    def inject_fault(self, how: str) -> None:
        """How loads fail. The kit does it in pipes, and an engine that loads what it has saved uses none."""
        super().inject_fault(how)

        def take(blocks: Blocks, index: int, key: Any, value: Any) -> None:
            if how == "fail":
                raise TransportError("the test's buffer is broken")
            _TAKE(blocks, index, key + 1 if how == "corrupt" else key, value)

        Blocks.layer = take if how else _TAKE
        self.later(lambda: setattr(Blocks, "layer", _TAKE))

    @contextmanager
    def refusing_saves(self) -> Iterator[None]:
        with mock.patch.object(Entries, "add", side_effect=CapacityError("the test's buffer is full")):
            yield


def test_it_keeps_the_laws_of_plugins() -> None:
    assert check_plugin("lookup") == ()
