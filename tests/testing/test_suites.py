"""What the command line names is judged as its author would have said; and what counts as growth."""

from __future__ import annotations

import attrs

from kvplug.testing.contract import suites
from kvplug.testing.contract.pipe.footprint import Footprint
from kvplug.testing.peers import Belongings

NOTHING = Belongings(frozenset(), frozenset(), frozenset(), frozenset(), frozenset())


def test_a_transport_that_does_not_leave_its_process_is_judged_in_one() -> None:
    memory = suites.installed(["pipe:memory"], [])[0]
    assert memory.transport == "memory"
    assert not memory.across_processes


def test_a_footprint_crosses_to_another_process_as_plain_values() -> None:
    taken = Footprint.taken()
    assert Footprint.from_plain(taken.plain()) == taken


def test_growth_is_what_a_process_that_keeps_messages_or_objects_would_show() -> None:
    before = Footprint(NOTHING, 100_000_000, 5000)
    assert not attrs.evolve(before, resident_bytes=100_400_000, objects=5010).growth(before, 10, 100_000)
    assert "bytes of memory" in attrs.evolve(before, resident_bytes=100_600_000).growth(before, 10, 100_000)
    assert "objects" in attrs.evolve(before, objects=5021).growth(before, 10, 100_000)
    held = attrs.evolve(NOTHING, threads=frozenset({"7 kvplug"}))
    assert "7 kvplug" in attrs.evolve(before, belongings=held).growth(before, 1000, 100_000)
