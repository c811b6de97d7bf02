"""Heads and units that two engines divide differently, references, and views of the paged cache."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvplug import HandshakeError
from kvplug.engine import NO_BLOCK, CacheGroup, KVCacheConfig, LayoutError
from kvplug_p2p.reference import MalformedError, Reference, digest_of, to_text, verified
from kvplug_p2p.sharing import head_ranges, heads_of, unit_of, units
from kvplug_p2p.views import HASHED_TOGETHER, CacheViews, hash_rows
from kvplug_testing.engine import PagedCache
from kvplug_testing.engine.cache import AXES
from p2p_engines import leaves, put

SIZES = [1, 2, 3, 4, 8]
KEY = b"k" * 32

# -- heads -------------------------------------------------------------------------------------------


def divides(a: int, b: int) -> bool:
    return not max(a, b) % min(a, b)


@pytest.mark.parametrize("theirs", SIZES)
@pytest.mark.parametrize("ours", SIZES)
def test_every_head_of_every_worker_comes_from_one_worker_that_has_it(ours: int, theirs: int) -> None:
    """Or the engines are refused: for fewer heads than workers, as many, and more."""
    for num_heads in range(1, 25):
        pulls: list[list[Any]] = []
        try:
            pulls = [head_ranges(rank, ours, theirs, num_heads) for rank in range(ours)]
        except HandshakeError:
            assert not (divides(ours, theirs) and divides(ours, num_heads) and divides(theirs, num_heads))
            continue
        assert divides(ours, theirs) and divides(ours, num_heads) and divides(theirs, num_heads)
        for rank, ranges in enumerate(pulls):
            got = {}
            for part in ranges:
                for number in range(part.count):
                    assert part.ours + number not in got, "a head comes twice"
                    got[part.ours + number] = heads_of(part.rank, theirs, num_heads)[part.theirs + number]
            assert [got[number] for number in range(len(got))] == [*heads_of(rank, ours, num_heads)]
            assert len({part.rank for part in ranges}) == len(ranges), "one worker is asked twice"
        if ours == theirs:
            assert all(ranges[0].rank == rank for rank, ranges in enumerate(pulls)), "not from its like"


@pytest.mark.parametrize("theirs", SIZES)
@pytest.mark.parametrize("ours", SIZES)
def test_latent_attention_comes_whole_from_one_worker(ours: int, theirs: int) -> None:
    for rank in range(ours) if divides(ours, theirs) else ():
        (part,) = head_ranges(rank, ours, theirs, 0)
        assert part.rank in range(theirs) and (part.theirs, part.ours, part.count) == (0, 0, 1)


# -- units -------------------------------------------------------------------------------------------


@given(
    st.sampled_from([(16, 16), (16, 32), (64, 16), (8, 8)]),
    st.lists(st.integers(0, 99) | st.just(NO_BLOCK), min_size=1, max_size=9),
    st.data(),
)
def test_units_are_the_tokens_of_their_blocks(sizes: Any, table: list[int], data: st.DataObject) -> None:
    size, other = sizes
    unit = unit_of(size, other)
    assert unit == min(sizes) == unit_of(other, size)
    last = len(table) * size // unit
    start = data.draw(st.integers(0, last)) * unit
    end = data.draw(st.integers(start // unit, last)) * unit
    found = units(table, size, unit, start, end)
    expected = [table[at // size] * size + at % size for at in range(start, end, unit)]
    assert [number * unit for number in found if number != NO_BLOCK] == [
        each for each in expected if each >= 0
    ]
    assert [number == NO_BLOCK for number in found] == [
        table[at // size] == NO_BLOCK for at in range(start, end, unit)
    ]
    with pytest.raises(LayoutError, match="do not fit"):
        units(table, size, unit, 0, len(table) * size + 1)


def test_block_sizes_that_do_not_divide_each_other_are_refused() -> None:
    with pytest.raises(HandshakeError, match=r"ours 16, theirs 24; make one a multiple"):
        unit_of(16, 24)


# -- references --------------------------------------------------------------------------------------

_texts, _numbers = st.text(max_size=20), st.integers(0, 2**62)
references = st.builds(
    Reference,
    engine_id=_texts,
    epoch=_texts,
    request_id=_texts,
    generation=_numbers,
    lease=_numbers,
    expires_ms=_numbers,
    address=st.sampled_from(["10.0.0.1:29555", "unix:@a-0", "[fd00::1]:1", "unix:/run/a-b-7"]),
    tensor_parallel_size=_numbers,
    block_size=_numbers,
    num_tokens=_numbers,
    digest=_texts,
    block_ids=st.lists(st.lists(st.integers(-1, 2**40), max_size=4).map(tuple), max_size=3).map(tuple),
)


_plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
)


@given(references, _plain, _plain, st.data())
def test_what_was_signed_is_read_again_and_any_change_of_it_is_refused(
    reference: Reference, added: Any, other: Any, data: st.DataObject
) -> None:
    params = json.loads(json.dumps(reference.to_params(KEY)))
    assert Reference.from_params(params) == reference
    params["remote_added_by_a_proxy"] = added
    assert verified(to_text(params), KEY) == reference, "a key that others have added counts"
    assert verified(to_text(params), b"x" * 32) is None
    del params["remote_added_by_a_proxy"]
    path = data.draw(st.sampled_from(leaves(params)))
    changed = copy.deepcopy(params)
    original = put(changed, path, other)
    if json.dumps(other) != json.dumps(original):
        try:
            assert verified(to_text(changed), KEY) is None, f"{path} is {other!r} instead of {original!r}"
        except MalformedError:
            pass  # a consumer refuses it by itself
    ours = {**params["kvplug"], "new": other}
    assert verified(to_text({**params, "kvplug": ours}), KEY) is None, "a field was added to what is signed"


@given(_plain | st.dictionaries(st.sampled_from(["kvplug", "tp_size", "remote_block_ids"]), _plain))
def test_anything_else_is_malformed(given_params: Any) -> None:
    params = given_params if isinstance(given_params, dict) else {"kvplug": given_params}
    with pytest.raises(MalformedError):
        Reference.from_params(params)
    assert verified(json.dumps(given_params).encode(), KEY) is None


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6), st.binary(max_size=4), st.data())
def test_a_digest_is_of_these_tokens_in_this_order_and_their_extra(
    tokens: list[int], extra: bytes, data: st.DataObject
) -> None:
    others = data.draw(st.lists(st.integers(0, 2**31 - 1), max_size=6)), data.draw(st.binary(max_size=4))
    assert (digest_of(extra, tokens) == digest_of(others[1], others[0])) == ((tokens, extra) == others)


# -- views -------------------------------------------------------------------------------------------


def views_of(cache: PagedCache) -> CacheViews:
    groups = (CacheGroup(layer_names=cache.layer_names, layout=cache.layout),)
    return CacheViews(KVCacheConfig(groups=groups, num_blocks=cache.num_blocks), cache.tensors)


@pytest.mark.parametrize("unit", [4, 8, 16])
@pytest.mark.parametrize("axes", AXES)
def test_views_are_these_tokens_and_heads_whatever_the_layout(axes: str, unit: int) -> None:
    """They show what the cache has there, and hash as the same tokens and heads in any other layout do."""
    cache, plain = PagedCache(axes, 16, 8), PagedCache(axes if axes == "BTD" else "KBTHD", unit, 128 // unit)
    for layer in range(len(cache.layer_names)):
        for each in (cache, plain):
            each.compute(layer, range(128), range(each.num_blocks), 0, 128)
    views = views_of(cache)
    numbers = [5 * 16 // unit, 3 * 16 // unit - 1]
    for head in range(cache.num_heads):
        found, rows = views.of(0, unit, head, 1, numbers)
        for layer, parts in enumerate(found.rows.bits):
            expected = plain.by_token(layer)[numbers, :, :, head : head + 1]
            for kv, part in enumerate(parts):
                assert (part[rows].numpy().view("float32") == expected[:, :, kv]).all(), (layer, head, kv)
        of_plain, plain_rows = views_of(plain).of(0, unit, head, 1, numbers)
        hashes = [*hash_rows("xxh3_64", found, 0, rows).values()]
        assert hashes == [*hash_rows("xxh3_64", of_plain, 0, plain_rows).values()]
        assert hashes != [*hash_rows("xxh3_64", found, 0, rows[::-1]).values()]


def test_hashes_of_a_part_are_those_that_are_known_of_the_whole_and_what_is_missing():
    cache = PagedCache("KBTHD", 32, 16)
    cache.compute(0, range(512), range(32), 0, 512)
    table = [*range(20, 30), *range(12, 0, -1)]
    found, rows = views_of(cache).of(0, 16, 0, cache.num_heads, table)
    known = hash_rows("xxh3_64", found, 0, rows)
    assert len(known) == 3
    for begin in range(len(table)):
        for end in range(begin + 1, len(table) + 1):
            first = HASHED_TOGETHER - begin % HASHED_TOGETHER
            part = hash_rows("xxh3_64", found, 0, rows[begin:end], first, known)
            assert part == hash_rows("xxh3_64", found, 0, rows[begin:end], first)
            assert len(part) == -(-end // HASHED_TOGETHER) - begin // HASHED_TOGETHER
    forged = dict.fromkeys(known, b"x")
    assert [*hash_rows("xxh3_64", found, 0, rows[8:], 8, forged).values()] == [b"x", b"x"], "computed again"


@pytest.mark.parametrize(
    ("unit", "first", "count", "numbers"),
    [
        (5, 0, 1, []),
        (0, 0, 1, []),
        (32, 0, 1, []),
        (16, 1, 2, []),
        (16, 0, 0, []),
        (8, 0, 2, [16]),
        (8, 0, 2, [-1]),
    ],
)
def test_what_the_cache_does_not_have_is_refused(
    unit: int, first: int, count: int, numbers: list[int]
) -> None:
    with pytest.raises(LayoutError):
        views_of(PagedCache("KBTHD", 16, 8)).of(0, unit, first, count, numbers)
