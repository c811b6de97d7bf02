"""The connector "lookup" keeps the laws, whichever way the pages of the store "host" are read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import pytest

from kvplug.transport import Deadline, GetJob, MissReason
from kvplug.transport.store.store import Store
from kvplug_testing import ConnectorContract

SMALL = MappingProxyType({"segment_bytes": 1 << 20})
"""Segments of the store, so that many engines cost little memory."""

COMMON = MappingProxyType({"transport": "cpu", "connect_timeout_s": 20, "buffer_size": 256 << 20})
"""The address space of the stores is reserved at once, so it is small."""


class TestOverPipes(ConnectorContract):
    """Pages come over the pipe "cpu", where the suite injects faults; an engine's own come from its arena."""

    connector = "lookup"
    config = MappingProxyType({**COMMON, "options": {"host": {**SMALL, "map": False}}})
    injects_into_own = True
    serves_beside_others = True

    _how = ""

    @pytest.fixture(autouse=True)
    def _own_loads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In the role "both" no pipe is crossed: the store itself answers with a miss."""
        from lookup_engines import missed  # not in the processes that the kit starts

        get = Store.submit_get

        def submit_get(store: Store, pages: Any, **given: Any) -> GetJob:
            if self._how != "fail" or type(store).__name__ != "HostStore":
                return get(store, pages, **given)
            return missed(pages, MissReason.STORE_GONE)

        monkeypatch.setattr(Store, "submit_get", submit_get)

    def inject_fault(self, how: str) -> None:
        super().inject_fault(how)
        self._how = how


@pytest.mark.variant
class TestMapped(TestOverPipes):
    """Pages are read from the peer's memory, over no pipe: faults are put into the reader's store."""

    config = MappingProxyType({**COMMON, "options": {"host": {**SMALL}}})

    @pytest.fixture(autouse=True)
    def _own_loads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from lookup_engines import missed  # not in the processes that the kit starts

        self._held = threading.Event()
        get = Store.submit_get

        def submit_get(store: Store, pages: Any, **given: Any) -> GetJob:
            if self._how == "hold":
                deadline = Deadline.after(given.get("timeout"), 20)
                job = GetJob(len(pages.keys), pages.series.format.num_layers, deadline)
                job.on_cancel(lambda: job.set([MissReason.CANCELLED] * job.count))
                self._held.set()
                return job
            if self._how:
                reason = MissReason.CORRUPT if self._how == "corrupt" else MissReason.STORE_GONE
                return missed(pages, reason)
            return get(store, pages, **given)

        monkeypatch.setattr(Store, "submit_get", submit_get)

    def inject_fault(self, how: str) -> None:
        self._how = how

    @contextmanager
    def holding_up(self) -> Iterator[threading.Event]:
        self._how = "hold"
        try:
            yield self._held
        finally:
            self._how = ""
