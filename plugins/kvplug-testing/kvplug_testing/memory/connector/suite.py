"""The connector suite for the connector "memory", whose loads can be made to fail."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import attrs

from kvplug import PeerGoneError, TimeoutError, TransportError
from kvplug_testing.contract.connector import ConnectorContract
from kvplug_testing.memory.connector.table import EntryTable, PromptEntry


def _fail(entry: PromptEntry) -> PromptEntry:
    raise TransportError("the test wants it so")


def _corrupt(entry: PromptEntry) -> PromptEntry:
    key, value = entry.layers[-1]
    key = key.clone()
    key.view(-1)[-1] += 1
    return attrs.evolve(entry, layers=(*entry.layers[:-1], (key, value)))


class MemoryConnectorContract(ConnectorContract):
    """Injects faults when entries are read, since no pipe carries them."""

    connector = "memory"
    injects_into_own = True
    serves_beside_others = True

    def inject_fault(self, how: str) -> None:
        self._fault({"fail": _fail, "corrupt": _corrupt, "": None}[how])

    @contextlib.contextmanager
    def holding_up(self) -> Iterator[threading.Event]:
        is_held = threading.Event()

        def hold(entry: PromptEntry) -> None:
            is_held.set()

        self._fault(hold)
        try:
            yield is_held
        finally:
            self._fault(None)

    @contextlib.contextmanager
    def refusing_saves(self) -> Iterator[None]:
        def refuse(*_: object) -> None:
            raise TimeoutError("the test wants it so")

        table = EntryTable.at(self.config_of("both").control_address())
        table.put = refuse  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            del table.put

    def _fault(self, fault: Callable[[PromptEntry], PromptEntry | None] | None) -> None:
        with contextlib.suppress(PeerGoneError):  # this test has no producer
            EntryTable.at(self.config_of("both").control_address()).fault = fault
