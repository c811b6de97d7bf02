"""Which unproven connection goes when there is no place, and how often an origin may fail."""

from __future__ import annotations

import tracemalloc

from kvplug.net.trust.strangers import BURST, PER_SECOND, Admission


def test_a_flood_drops_its_own_connections_and_leaves_places_for_others() -> None:
    admission = Admission[int](max_unproven=8)
    for number in range(6):
        assert admission.to_drop("flood") is None
        admission.add(number, "flood")
    assert admission.to_drop("flood") == 0
    for number in (6, 7):
        assert admission.to_drop("other") is None
        admission.add(number, "other")
    assert admission.to_drop("third") == 0  # full: the origin that has most makes room


def test_an_origin_whose_connections_fail_waits_and_another_one_does_not() -> None:
    admission = Admission[int](max_unproven=8)
    for _ in range(BURST):
        assert admission.may_come("flood", 100.0)
        admission.failed("flood", 100.0)
    assert not admission.may_come("flood", 100.0)
    assert admission.may_come("other", 100.0)
    assert admission.may_come("flood", 100.0 + 1.01 / PER_SECOND)
    come = 0
    for tenth in range(100):  # ten seconds, fifty tries a second
        for _ in range(5):
            if admission.may_come("flood", 200.0 + tenth / 10):
                admission.failed("flood", 200.0 + tenth / 10)
                come += 1
    assert come <= BURST + 10 * PER_SECOND


def test_origins_that_were_never_seen_again_are_forgotten() -> None:
    admission = Admission[int](max_unproven=8)
    for number in range(200):
        admission.failed(f"host {number}", float(number))
    tracemalloc.start()
    try:
        for number in range(200, 30_000):
            admission.failed(f"host {number}", float(number))
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 1 << 20, "the failures of 30,000 origins take five times as much"
