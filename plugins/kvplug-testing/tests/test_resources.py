"""What a process holds by /proc, which does not always list all of it."""

from __future__ import annotations

from typing import Any

import attrs

from kvplug_testing.resources import Resources, steady


def test_a_thread_that_a_listing_leaves_out_was_there() -> None:
    readings = iter([["7", "8"], ["7"], ["7", "8"], ["7", "8"]])
    assert steady(lambda: next(readings)) == ["7", "8"]


def test_of_many_leaked_resources_the_first_few_and_their_number_are_named() -> None:
    nothing = Resources(*[frozenset[Any]()] * 4)
    descriptors = frozenset(f"{number} -> socket:[{number}]" for number in range(7, 2007))
    text = attrs.evolve(nothing, descriptors=descriptors, children=frozenset([12, 4])).beyond(nothing)
    assert text.startswith("descriptors: 10 -> socket:[10], 100 -> socket:[100], ")
    assert text.endswith(", and 1,990 more; children: 12, 4")
    assert len(text) < 400
