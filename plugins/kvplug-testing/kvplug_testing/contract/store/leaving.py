"""A program with an end of a store leaves while requests are under way (law ALL-8)."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import pytest

from kvplug.transport import MissReason, Store
from kvplug_testing import peers
from kvplug_testing.contract.base import law
from kvplug_testing.contract.leaving import OTHER_WAYS, WAYS, check_left, leave
from kvplug_testing.contract.store.pages import Batch, sized_format
from kvplug_testing.contract.store.suite import Place, StoreSuite, at_both_ends, kept
from kvplug_testing.contract.suite_ref import suite_from_ref

_PAGES = 4
_REQUESTS = 4
_THREADS = 3
_USE_S = 0.1


def leave_at_work(
    parent: peers.Parent, suite_ref: Mapping[str, Any], plain: dict[str, Any], end: str, way: str
) -> None:
    """In another process: open an end of the place, use it, and leave the program."""
    suite = suite_from_ref(suite_ref)
    suite._stack = ExitStack()  # not closed: the program leaves with what it has
    place = Place(**plain)
    store = suite.open(place) if end == "first" else suite.other(place)
    pages = suite.batch(store, _PAGES, sized_format(200_000))
    kept(store, pages)
    for _ in range(_REQUESTS):
        store.submit_get(pages.empty())
        store.submit_put(suite.batch(store, _PAGES, pages.form).filled())
    if way == "neither":
        _use_in_threads(store, pages)
    leave(parent, way, abort=store.abort, close=store.close)


def _use_in_threads(store: Store, pages: Batch) -> None:
    """Threads of the program's own, which do not know that it leaves."""

    def use() -> None:
        while True:
            results: list[object] = [*store.submit_lookup(pages.keys).wait()]
            results += store.submit_get(pages.empty()).wait()
            results += store.submit_put(pages.filled()).wait()
            store.touch(pages.keys)
            store.usage()
            assert MissReason.CLOSED not in results, f"the program goes on with {results}"

    for number in range(_THREADS):
        threading.Thread(target=use, name=f"of the program {number}", daemon=True).start()
    time.sleep(_USE_S)


class Leaving(StoreSuite):
    """Leaving a program with an end of a store."""

    @law("ALL-8", needs="forked_processes", level="long")
    @at_both_ends
    @pytest.mark.parametrize("way", WAYS)
    def test_a_program_that_leaves_while_requests_are_under_way_ends_with_its_own_code(
        self, way: str, end: str
    ) -> None:
        place = self.place()
        if end == "other":
            if reason := self.other_and_forked_processes:
                pytest.skip(reason)
            self.open(place)
            self.make_reachable(place)
        target = f"{__name__}:leave_at_work"
        check_left(self.start_forked(target, self.suite_ref(), place.plain, end, way))

    @law("ALL-8", level="long", needs="forked_processes")
    @at_both_ends
    @pytest.mark.parametrize("way", OTHER_WAYS)
    def test_so_does_one_that_closed_its_end_and_a_forked_child(self, way: str, end: str) -> None:
        self.test_a_program_that_leaves_while_requests_are_under_way_ends_with_its_own_code(way, end)
