"""The connector "memory" keeps the laws, and what is particular to it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import pytest

from kvplug.errors import TransportError
from kvplug_testing import ConnectorContract
from kvplug_testing.contract.connector.schedules import QUICK
from kvplug_testing.memory.entry_table import EntryTable, PromptEntry


def fail(entry: PromptEntry) -> PromptEntry:
    raise TransportError("the test wants it so")


def corrupt(entry: PromptEntry) -> PromptEntry:
    key, value = entry.layers[-1]
    key = key.clone()
    key.view(-1)[-1] += 1
    return attrs.evolve(entry, layers=(*entry.layers[:-1], (key, value)))


class TestMemory(ConnectorContract):
    connector = "memory"
    injects_into_own = True

    def inject_fault(self, how: str) -> None:
        self._table().fault = {"fail": fail, "corrupt": corrupt, "": None}[how]

    @contextmanager
    def holding_up(self) -> Iterator[threading.Event]:
        is_held = threading.Event()

        def hold(entry: PromptEntry) -> PromptEntry:
            is_held.set()
            threading.Event().wait(1.0)
            return fail(entry)

        self._table().fault = hold
        try:
            yield is_held
        finally:
            self._table().fault = None

    @pytest.mark.parametrize(
        ("first", "given"),
        [(0, {}), (1000, {"background": True}), (2000, {"spoils": True}), (5000, None)],
        ids=["pair", "background", "failing", "both"],
    )
    def test_the_seeds_of_the_level_quick_do_all_that_engines_do(
        self, first: int, given: dict[str, bool] | None
    ) -> None:
        counts: Counter[str] = Counter()
        for seed in QUICK:
            with self.scope():
                if given is None:
                    done = self._run_both(first + seed, spoils=True)
                else:
                    done = self._run_pair(first + seed, **given)
            self._host = ""
            counts += done.counts
        wanted = {"preempted", "aborted", "chunked", "ahead"} | ({"async"} if first == 1000 else set())
        assert wanted <= counts.keys(), f"never: {', '.join(sorted(wanted - counts.keys()))}"

    def _table(self) -> EntryTable:
        return EntryTable.at(self.config_of("both").control_address())
