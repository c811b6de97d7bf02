"""The connector "memory" keeps the laws, and what is particular to it."""

from __future__ import annotations

from typing import Any

import attrs

from kvplug.errors import TransportError
from kvplug.testing import ConnectorContract
from kvplug.testing.memory.shelf import Entry, Shelf


def fail(entry: Entry) -> Entry:
    raise TransportError("the test wants it so")


def corrupt(entry: Entry) -> Entry:
    key, value = entry.layers[-1]
    key = key.clone()
    key.view(-1)[-1] += 1
    return attrs.evolve(entry, layers=(*entry.layers[:-1], (key, value)))


class TestMemory(ConnectorContract):
    connector = "memory"
    spoils_own = True

    def spoil(self, how: str) -> None:
        fault: Any = {"fail": fail, "corrupt": corrupt, "": None}[how]
        Shelf.at(self.config_of("both").control_address()).fault = fault
