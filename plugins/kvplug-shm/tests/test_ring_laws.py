"""Invariants of a ring in every interleaving of its ends.

Every reader gets each unit once and in order. No unit is overwritten before it is released. No end sleeps for
ever or waits without sleeping. If an end closes, dies or is evicted, the others continue, and readers get all
units that a dead writer has published.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

import ring_library
from kvplug_shm.ring import ends, protocol
from ring_explorer import Explorer, StuckError
from ring_processes import Steps
from ring_programs import CASES, ONE, Case, LawError, Programs


def explore(programs: Programs, *changes: ring_library.Change, has_fence: bool = True, **how: Any) -> int:
    steps = Steps(ring_library.explored(*changes, has_fence=has_fence))
    return Explorer(programs.num_words, programs.all(), steps, **how).explore(programs.check)


pytestmark = pytest.mark.skipif(ring_library.compiler() is None, reason="there is no compiler")


def marked(marks: Any, *cases: Case) -> list[Any]:
    return [pytest.param(case, marks=marks, id=str(case)) for case in cases]


@pytest.mark.parametrize(
    "case",
    [
        *marked((), *CASES[:7], *CASES[8:10], *CASES[11:]),
        *marked(
            pytest.mark.full,
            CASES[7],
            CASES[10],
            Case(sizes=ONE * 4, places=3, readers=2),
            Case(sizes=ONE * 3, places=1, readers=2),
            Case(sizes=(2, 1, 3), places=3, readers=2),
            Case(sizes=(1, 2, 3, 2), places=3, readers=2, streams=True),
            Case(sizes=ONE * 3, places=1, readers=2, leaves=True),
            Case(sizes=ONE * 4, places=3, leaves=True, streams=True),
            Case(sizes=ONE * 2, places=1, readers=2, reader_dies=True),
            Case(sizes=(2, 1, 3, 1), places=3, reader_dies=True),
            Case(sizes=ONE * 4, places=3, reader_suspected=True),
            Case(sizes=(2, 1, 2), places=3, reader_suspected=True, streams=True),
            Case(sizes=ONE * 2, places=2, reader_suspected=True, watchers=2),
            Case(sizes=ONE * 4, places=3, writer_dies=True),
            Case(sizes=(2, 1, 3, 1), places=3, writer_dies=True, streams=True),
            Case(sizes=ONE * 3, places=2, writer_suspected=True),
            Case(sizes=ONE * 2, places=1, reader_suspected=True, writer_dies=True),
        ),
        *marked(
            [pytest.mark.slow, pytest.mark.timeout(1800)],
            Case(sizes=ONE * 5, places=3, readers=2),
            Case(sizes=ONE * 3, places=2, readers=2, leaves=True),
            Case(sizes=ONE * 3, places=2, readers=2, reader_dies=True),
            Case(sizes=ONE * 2, places=1, readers=2, reader_suspected=True),
            Case(sizes=ONE * 2, places=1, readers=2, writer_dies=True),
            Case(sizes=ONE * 2, places=1, reader_suspected=True, watchers=2),
            Case(sizes=ONE * 2, places=1, writer_suspected=True, writer_vanishes=True, watchers=2),
        ),
    ],
)
def test_the_laws_hold_in_every_interleaving(case: Case) -> None:
    explore(Programs(case, protocol, ends))


def test_a_futex_may_compare_as_few_bits_as_the_places_need() -> None:
    """With three places, a word that an end waits for moves by at most 7, as with 2**30 - 1 places in 32
    bits.
    """
    explore(Programs(Case(sizes=ONE * 7, places=3), protocol, ends), bits=3)


@pytest.mark.parametrize(("messages", "places", "bits"), [(5, 4, 3), (2, 1, 0)])
def test_a_futex_that_compares_fewer_bits_than_the_places_need_leaves_both_asleep(
    messages: int, places: int, bits: int
) -> None:
    with pytest.raises(StuckError):
        explore(Programs(Case(sizes=ONE * messages, places=places), protocol, ends), bits=bits)


class ReleasedEarly(Programs):
    """It releases, then reads."""

    def _take(self, memory: Any, end: Any, size: int) -> list[int] | None:
        first = end.read
        end.release(size)
        units = self._units(memory, first, size)
        return None if end.evicted() else units


def test_an_end_that_is_used_in_the_wrong_order_is_found() -> None:
    with pytest.raises(LawError):
        explore(ReleasedEarly(Case(sizes=ONE * 2, places=1), protocol, ends))


@pytest.mark.parametrize(
    "change",
    [
        (
            "    kvplug_publish(end, gap + count);",
            "    kvplug_publish(end, gap);\n    kvplug_publish(end, count);",
        ),
        ("        store_word(end->words, JUMP, end->jump);", "        kvplug_publish(end, 0);"),
        ("} else if (before > *skip) {", "} else if (0) {"),
    ],
    ids=["the jump alone", "not stored", "not seen ahead"],
)
def test_a_jump_that_is_published_or_taken_in_another_way_is_found(change: ring_library.Change) -> None:
    with pytest.raises(LawError):
        explore(Programs(Case(sizes=ONE * 5, places=3, jumps=True), protocol, ends), change)


def test_without_its_fence_an_announcement_can_leave_an_end_asleep() -> None:
    """The store buffers of the model find that, and without them nothing would."""
    for late in (False, True):
        with pytest.raises(StuckError) if late else contextlib.nullcontext():
            explore(Programs(CASES[0], protocol, ends), has_fence=False, late=late)
