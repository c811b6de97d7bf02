"""Counted leases against a plain model of them."""

from __future__ import annotations

from hypothesis import example, given, strategies as st

from kvplug.engine.page_cache import LeaseCounts

KEYS = st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=4)


@given(st.lists(st.tuples(st.sampled_from(["hold", "release", "wait"]), KEYS), max_size=30))
@example([("hold", [b"a"]), *[("wait", [b"a"])] * 3, ("hold", [b"a"]), ("release", [b"a"])])
def test_leases_end_with_their_last_release_or_with_their_time(steps: list[tuple[str, list[bytes]]]) -> None:
    now = 0.0
    counts_of = LeaseCounts(clock=lambda: now)
    counts: dict[bytes, int] = {}
    until: dict[bytes, float] = {}
    for step, keys in steps:
        if step == "wait":
            now += 4.0
        elif step == "hold":
            counts_of.hold(keys, 10.0)
            for key in keys:
                counts[key] = (counts.get(key, 0) if until.get(key, 0) > now else 0) + 1
                until[key] = now + 10.0
        else:
            last = []
            for key in keys:
                if counts.get(key, 0) == 1:
                    last.append(key)
                counts[key] = max(0, counts.get(key, 0) - 1)
            assert counts_of.release(keys) == last
        leased = {key for key in counts if counts[key] and until[key] > now}
        assert {key for key in (b"a", b"b", b"c") if counts_of.is_leased(key)} == leased
    assert len(counts_of) == len(leased) if steps else True
