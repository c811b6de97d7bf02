"""What a process holds, as /proc says it, which is not always all of it."""

from __future__ import annotations

import os
import threading
from typing import Any

import attrs
import pytest

from kvplug_testing import resources
from kvplug_testing.resources import Resources

OWN = f"/proc/{os.getpid()}/task"


def test_a_thread_that_a_listing_leaves_out_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    whole, cut = os.listdir, iter([True, False, True])

    def listdir(path: Any) -> list[str]:
        found = whole(path)
        return [
            each for each in found if path != OWN or each != str(thread.native_id) or not next(cut, False)
        ]

    monkeypatch.setattr(resources.os, "listdir", listdir)
    try:
        threads = {int(each.split()[0]) for each in Resources.of().threads}
    finally:
        ended.set()
        thread.join()
    assert thread.native_id in threads
    assert next(cut, None) is None


def test_of_many_leaked_resources_the_first_few_and_their_number_are_told() -> None:
    nothing = Resources(*[frozenset[Any]()] * 5)
    descriptors = frozenset(f"{number} -> socket:[{number}]" for number in range(7, 2007))
    said = attrs.evolve(nothing, descriptors=descriptors, children=frozenset([12, 4])).beyond(nothing)
    assert said.startswith("descriptors: 10 -> socket:[10], 100 -> socket:[100], ")
    assert said.endswith(", and 1,990 more; children: 12, 4")
    assert len(said) < 400
