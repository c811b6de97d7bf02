"""A ring with any step missing, or swapped with the next, breaks a law; or it is told why it does not."""

from __future__ import annotations

import pytest

from kvplug_shm.ring import ends, protocol
from ring_explorer import BusyError, Explorer, StuckError
from ring_programs import CASES, Case, LawError, Programs
from ring_variants import Variant, variants
from test_ring_counts import Memory

WAKES = "a call of the kernel more, which wakes no end, or one that looks again and sleeps on"
STRANGE = (
    "no end of ours stores what it looks for, or an evicted reader does not believe it; see test_ring_counts"
)
TOLD = "the count of a reader that was evicted is only told, as its lag; see test_ring_counts"

HARMLESS = {
    "announce: without `return`": WAKES,
    "announce: `words[each]` taken as 1": WAKES,
    "park: without `words[own] = 0`": WAKES,
    "WritingEnd.room: without `if not 0 <= left <= places:`": STRANGE,
    "WritingEnd.evict: `words[tail]` taken as 0": TOLD,
    "WritingEnd.evict: `words[tail]` taken as 1": TOLD,
    "ReadingEnd.available: without `if available > self._places:`": STRANGE,
    "ReadingEnd.available: without `if not self.evicted():`": STRANGE,
    "ReadingEnd.available: `return max(available, 0)` before `if available > self._places:`": STRANGE,
    "ReadingEnd.available: `return self._places` before `if not self.evicted():`": STRANGE,
}
VARIANTS = variants(protocol, ends)


def breach(variant: Variant, case: Case, *, late: bool = True) -> AssertionError | None:
    """An exception of another kind is no breach, and goes on."""
    programs = Programs(case, variant.protocol, variant.ends)
    try:
        Explorer(programs.num_words, programs.all(), late=late).explore(programs.check)
    except (StuckError, BusyError, LawError) as error:
        return error
    return None


def misreports_who_ended(variant: Variant) -> bool:
    """Whether a reader that evicts the writer, once or twice, forgets whether the writer had ended itself."""
    for ends_itself in (True, False):
        memory = Memory(1)
        reader = variant.ends.ReadingEnd(memory, 0, 2)
        if ends_itself:
            variant.ends.WritingEnd(memory, 1, 2).end()
        for _ in range(3):
            if reader.writer_ended is not ends_itself:
                return True
            reader.evict_writer()
    return False


def test_a_reader_knows_whether_the_writer_ended_itself() -> None:
    assert not misreports_who_ended(Variant(protocol, ends))


@pytest.mark.mutant
@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in HARMLESS])
def test_a_ring_with_a_step_missing_or_swapped_breaks_a_law(name: str) -> None:
    variant = VARIANTS[name]()
    assert misreports_who_ended(variant) or any(breach(variant, case) for case in CASES)


@pytest.mark.mutant
@pytest.mark.parametrize("name", HARMLESS)
def test_a_ring_that_is_told_to_be_as_good_breaks_none(name: str) -> None:
    variant = VARIANTS[name]()
    assert [breach(variant, case) for case in CASES] == [None] * len(CASES), HARMLESS[name]


def test_every_access_of_the_announcement_and_the_sleep_is_a_step() -> None:
    accesses = ["words[word] = value", "memory.fence()", "memory.wake(word)"]
    sleeps = ["words[own] = 1", "memory.wait(word, seen, seconds)", "words[own] = 0"]
    names = [f"announce: without `{step}`" for step in accesses]
    names += [f"park: without `{step}`" for step in sleeps]
    assert set(names) <= set(VARIANTS)


@pytest.mark.mutant
def test_without_late_stores_nobody_would_miss_the_fence() -> None:
    """It is the model of the processor that finds the missing one."""
    variant = VARIANTS["announce: without `memory.fence()`"]()
    assert [breach(variant, case, late=False) for case in CASES] == [None] * len(CASES)
