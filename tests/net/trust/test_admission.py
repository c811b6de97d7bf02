"""Which unproven connection goes when there is no place, and how often an origin may fail."""

from __future__ import annotations

import tracemalloc

from kvplug.net.trust.admission import BURST, PER_SECOND, FailureRate, place_to_free


def test_a_flood_drops_its_own_connections_and_leaves_places_for_others() -> None:
    unproven: list[str] = []

    def come(origin: str) -> int | None:
        dropped = place_to_free(unproven, origin, 8)
        if dropped is None:
            unproven.append(origin)
        return dropped

    assert come("other") is None
    assert all(come("flood") is None for _ in range(6))
    assert come("flood") == 1
    assert come("other") is None
    assert come("third") == 1  # full: the origin that has most makes room


def test_an_origin_whose_connections_fail_waits_and_another_one_does_not() -> None:
    failures = FailureRate()
    for _ in range(BURST):
        assert failures.may_come("flood", 100.0)
        failures.failed("flood", 100.0)
    assert not failures.may_come("flood", 100.0)
    assert failures.may_come("other", 100.0)
    assert failures.may_come("flood", 100.0 + 1.01 / PER_SECOND)
    come = 0
    for tenth in range(100):  # ten seconds, fifty tries a second
        for _ in range(5):
            if failures.may_come("flood", 200.0 + tenth / 10):
                failures.failed("flood", 200.0 + tenth / 10)
                come += 1
    assert come <= BURST + 10 * PER_SECOND


def test_origins_that_were_never_seen_again_are_forgotten() -> None:
    failures = FailureRate()
    for number in range(200):
        failures.failed(f"host {number}", float(number))
    tracemalloc.start()
    try:
        for number in range(200, 30_000):
            failures.failed(f"host {number}", float(number))
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 1 << 20, "the failures of 30,000 origins take five times as much"
