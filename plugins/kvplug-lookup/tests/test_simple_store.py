from __future__ import annotations

import contextlib
import os
import time

import pytest
import torch

from kvplug import (
    CapacityError,
    ClosedError,
    EntryGoneError,
    Follower,
    RemovalReason,
    Removed,
    Snapshot,
    Stored,
    TimeoutError,
    UnsupportedError,
)
from kvplug_lookup import store as stores

M61 = 2**61 - 1


def same(a, b):
    return (a is None and b is None) or (a.dtype == b.dtype and torch.equal(a, b))


def bytes_of(parts):
    tokens, _, *rest = parts
    return 9 * len(tokens) + sum(part.nbytes for part in rest if part is not None)


# -- what is stored comes out ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool])
def test_all_five_parts_come_out_as_they_went_in(joined, entry, dtype):
    store = joined.store()
    tokens, roi, key, value, hidden = entry([1, 2, 3], roi=[True, False, True], dtype=dtype)
    entry_id = store.insert(tokens, roi, key, value, hidden, metadata={"hash": [b"x"], "n": 3})
    got = store.drop_select([1, 3])
    assert got.tokens.tolist() == tokens and got.tokens.dtype is torch.int64
    assert got.roi.tolist() == roi and got.roi.dtype is torch.bool
    assert torch.equal(got.key.view(torch.uint8), key.view(torch.uint8))
    assert torch.equal(got.value.view(torch.uint8), value.view(torch.uint8))
    assert torch.equal(got.hidden.view(torch.uint8), hidden.view(torch.uint8))
    assert got.header.entry_id == entry_id
    assert got.header.num_layers == 2
    assert got.header.metadata == {"hash": [b"x"], "n": 3}


@pytest.mark.parametrize("missing", ["key", "value", "hidden", "all"])
def test_every_part_but_the_tokens_may_be_none(joined, entry, missing):
    store = joined.store()
    parts = dict(zip(("tokens", "roi", "key", "value", "hidden"), entry([5, 6]), strict=True))
    for name in ("key", "value", "hidden") if missing == "all" else (missing,):
        parts[name] = None
    store.insert(*parts.values())
    got = store.drop_select([5, 6])
    for name in ("key", "value", "hidden"):
        assert same(getattr(got, name), parts[name])
    assert got.header.num_layers == (0 if missing == "all" else 2)
    assert got.roi.tolist() == [True, True]


def test_an_insert_copies_so_that_the_caller_may_overwrite(joined, entry):
    store = joined.store()
    tokens, roi, key, value, hidden = entry([1, 2])
    tokens = torch.tensor(tokens)
    metadata = {"a": [1]}
    kept = key.clone()
    store.insert(tokens, roi, key, value, hidden, metadata=metadata)
    tokens.zero_(), key.zero_(), metadata["a"].append(2)
    got = store.drop_select([1, 2])
    assert torch.equal(got.key, kept)
    assert got.header.metadata == {"a": [1]}


def test_non_contiguous_tensors_are_stored_as_they_read(joined):
    store = joined.store()
    key = torch.arange(2 * 3 * 4 * 5.0).reshape(5, 4, 3, 2).permute(3, 2, 1, 0)
    store.insert([1, 2, 3], None, key, None, None)
    got = store.drop_select([1])
    assert torch.equal(got.key, key) and got.key.is_contiguous()


def test_a_reader_gets_a_copy_and_leaves_the_entry(joined, entry):
    store = joined.store()
    parts = entry([1, 2, 3])
    store.insert(*parts)
    got = store.select([1, 2, 3, 4])
    got.key.zero_(), got.tokens.zero_(), got.header.metadata.update(x=1)
    again = store.select([1, 2, 9])
    assert torch.equal(again.key, parts[2]) and again.tokens.tolist() == [1, 2, 3]
    assert again.header.metadata == {}
    assert store.match([1, 2, 3]) == 3


def test_a_sink_gets_each_layer_and_the_entry_comes_without_them(joined, entry):
    store = joined.store()
    parts = entry([1, 2, 3], layers=3)
    store.insert(*parts)
    layers = []

    class Sink:
        def begin(self, header):
            layers.append(header.num_layers)

        def layer(self, index, key, value):
            layers.append((index, key.clone(), value.clone()))

    got = store.select([1, 2, 3], sink=Sink())
    assert got.key is None and got.value is None and torch.equal(got.hidden, parts[4])
    assert layers[0] == 3
    for index, key, value in layers[1:]:
        assert torch.equal(key, parts[2][index]) and torch.equal(value, parts[3][index])


# -- the law of matching -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "query", "matches"),
    [
        ([1, 2, 3], [1, 2, 3], True),
        ([1, 2, 3], [1, 2, 3, 4, 5], True),  # the entry is shorter
        ([1, 2, 3, 4, 5], [1, 2], True),  # the entry is longer
        (list(range(17)), list(range(16)), True),  # not on a block's border
        ([7], [7, 8, 9], True),  # under one block
        ([1, 2, 3], [1, 2, 4], False),
        ([1, 2, 3], [2, 3], False),
        ([7, 120001, 9], [7, 120002, 9], False),
        ([120001], [120002], False),
        ([4, 5], [4 + M61, 5], False),
        ([4, 5 + M61], [4, 5], False),
        ([-1, 3], [-2, 3], False),
    ],
)
def test_an_entry_matches_if_one_is_a_prefix_of_the_other(joined, entry, held, query, matches):
    store = joined.store()
    store.insert(*entry(held))
    if matches:
        assert store.drop_select(query, timeout=0).tokens.tolist() == held
        assert len(store) == 0
    else:
        with pytest.raises(TimeoutError, match="a query of"):
            store.drop_select(query, timeout=0)
        assert len(store) == 1


def test_the_same_tokens_with_another_extra_are_a_miss(joined, entry):
    store = joined.store()
    store.insert(*entry([1, 2]), extra=b"lora-a")
    assert store.match([1, 2]) == 0
    assert store.match([1, 2], extra=b"lora-b") == 0
    assert store.match([1, 2], extra=b"lora-a") == 2
    for extra in (b"", b"lora-b"):
        with pytest.raises(TimeoutError):
            store.drop_select([1, 2], extra=extra, timeout=0)
        with pytest.raises(TimeoutError):
            store.drop_select(None, extra=extra, timeout=0)
        with pytest.raises(EntryGoneError):
            store.select([1, 2], extra=extra)
    assert store.drop_select(None, extra=b"lora-a").tokens.tolist() == [1, 2]


def test_only_tokens_under_the_roi_count(joined, entry):
    store = joined.store()
    store.insert(*entry([1, 2, 3, 4], roi=[False, True, True, False]))
    assert store.match([2, 3]) == 2
    assert store.match([9, 2, 3], [False, True, True]) == 2
    assert store.match(torch.tensor([2, 9, 3]), torch.tensor([True, False, True])) == 2
    assert store.match([1, 2, 3, 4]) == 0
    assert store.drop_select([2, 3]).tokens.tolist() == [1, 2, 3, 4]


def test_the_oldest_match_wins_and_none_takes_the_oldest_of_all(joined, entry):
    store = joined.store()
    for tokens in ([9], [1, 2, 3], [1, 2], [1, 2, 3]):
        store.insert(*entry(tokens))
    assert store.drop_select([1, 2]).tokens.tolist() == [1, 2, 3]
    assert store.drop_select([1, 2]).tokens.tolist() == [1, 2]
    assert store.drop_select(None).tokens.tolist() == [9]
    assert store.drop_select(None).tokens.tolist() == [1, 2, 3]


def test_a_match_is_the_longest_common_prefix_whatever_follows_it(joined, entry):
    store = joined.store()
    store.insert(*entry([1, 2, 3, 4]))
    store.insert(*entry([1, 2, 9]))
    assert store.match([1, 2, 3, 7]) == 3
    assert store.match([1, 2, 9, 9]) == 3
    assert store.match([5]) == 0
    assert store.match([]) == 0
    assert store.select([1, 2, 9, 9]).tokens.tolist() == [1, 2, 9]


def test_a_reader_who_wants_more_tokens_than_are_shared_is_told_at_once(joined, entry):
    store = joined.store()
    store.insert(*entry([1, 2, 3]))
    assert store.select([1, 2, 9], min_tokens=2).header.num_layers == 2
    with pytest.raises(EntryGoneError, match="3 tokens"):
        store.select([1, 2, 9], min_tokens=3)


@pytest.mark.parametrize(
    ("tokens", "roi", "error"),
    [
        ([], None, ValueError),
        ([1, 2], [False, False], ValueError),
        ([1, 2], [True], ValueError),
        ([1, 2], [0.5, 1.0], UnsupportedError),
        ([1, 2], [1, 0], UnsupportedError),
        ([1.5, 2.0], None, UnsupportedError),
        (torch.tensor([1.0]), None, UnsupportedError),
        (torch.tensor([True]), None, UnsupportedError),
        (torch.ones(2, 2, dtype=torch.int64), None, ValueError),
    ],
)
def test_tokens_and_roi_that_cannot_be_a_key_are_refused(joined, tokens, roi, error):
    store = joined.store()
    with pytest.raises(error):
        store.insert(tokens, roi, None, None, None)
    assert len(store) == 0 and store.bytes_used == 0


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        (torch.ones(2, 3, 1, 1), None, ValueError),
        (torch.ones(2), None, ValueError),
        (torch.ones(2, 2, 1, 1), torch.ones(3, 2, 1, 1), ValueError),
        ([1, 2], None, UnsupportedError),
    ],
)
def test_shapes_that_do_not_belong_together_are_refused(joined, key, value, error):
    store = joined.store()
    with pytest.raises(error):
        store.insert([1, 2], None, key, value, None)
    assert store.bytes_used == 0


def test_metadata_that_could_not_travel_is_refused_where_it_is_inserted(joined):
    store = joined.store()
    with pytest.raises(UnsupportedError):
        store.insert([1], None, None, None, None, metadata={"f": object()})
    assert store.bytes_used == 0


# -- the budget --------------------------------------------------------------------------------


def test_an_entry_over_the_budget_is_refused_at_once(joined, entry):
    parts = entry([1, 2, 3])
    store = joined.store(bytes_of(parts) - 1)
    with pytest.raises(CapacityError, match=f"{bytes_of(parts)} bytes"):
        store.insert(*parts, timeout=None)
    fits = joined.store(bytes_of(parts))
    fits.insert(*parts, timeout=0)
    assert fits.bytes_used == bytes_of(parts)


def test_an_insert_waits_for_room_and_goes_on_when_there_is_some(joined, entry, started):
    parts = entry([1, 2, 3])
    store = joined.store(2 * bytes_of(parts))
    store.insert(*parts)
    store.insert(*parts)
    waiting = started(store.insert, *parts)
    assert waiting.is_waiting()
    store.drop_select([1, 2, 3])
    waiting.result()
    assert store.bytes_used == 2 * bytes_of(parts)


def test_an_insert_that_finds_no_room_in_time_says_what_is_held(joined, entry):
    parts = entry([1, 2, 3])
    store = joined.store(bytes_of(parts))
    store.insert(*parts)
    with pytest.raises(TimeoutError, match=rf"{bytes_of(parts)} bytes: .* 1 entries, 0 of them lent"):
        store.insert(*parts, timeout=0.05)
    assert len(store) == 1 and store.bytes_used == bytes_of(parts)


def test_bytes_come_back_to_zero_when_everything_was_taken(joined, entry):
    store = joined.store()
    for n in range(1, 20):
        store.insert(*entry(range(n)))
    for _ in range(1, 20):
        store.drop_select(None)
    assert store.bytes_used == 0 and len(store) == 0


def test_evict_oldest_makes_room_but_not_of_what_is_being_read(joined, entry):
    parts = entry([1, 2, 3])
    store = joined.store(2 * bytes_of(parts), evict="oldest")
    store.insert(*entry([1, 2, 3]))
    store.insert(*entry([4, 5, 6]))

    class InsertsMeanwhile:
        def begin(self, header):
            store.insert(*entry([7, 8, 9]), timeout=0)

        def layer(self, index, key, value):
            pass

    store.select([1, 2, 3], sink=InsertsMeanwhile())
    assert store.match([1, 2, 3]) == 3
    assert store.match([4, 5, 6]) == 0
    assert store.match([7, 8, 9]) == 3


def test_nothing_is_evicted_for_an_entry_that_would_not_fit_even_so(joined, entry):
    small = entry([1])
    store = joined.store(2 * bytes_of(small), evict="oldest")
    store.insert(*entry([2]))
    store.insert(*entry([1]))

    class Sink:
        def begin(self, header):
            with pytest.raises(TimeoutError):
                store.insert(*entry([3, 4]), timeout=0)

        def layer(self, index, key, value):
            pass

    store.select([1], sink=Sink())
    assert store.match([2]) == 1


def test_old_entries_go_when_room_is_needed_even_during_the_wait(joined, entry):
    parts = entry([1, 2, 3])
    store = joined.store(bytes_of(parts), ttl_s=0.15)
    store.insert(*parts)
    with pytest.raises(TimeoutError):
        store.insert(*entry([4, 5, 6]), timeout=0)
    assert store.match([1, 2, 3]) == 3
    store.insert(*entry([4, 5, 6]), timeout=5)
    assert store.match([1, 2, 3]) == 0 and store.match([4, 5, 6]) == 3


# -- waiting for an entry ----------------------------------------------------------------------


def test_drop_select_waits_for_the_entry_and_only_its_own_waiter_wakes(joined, entry, started):
    store = joined.store()
    waiting = [started(store.drop_select, [n, 1], extra=b"e") for n in (1, 2, 3)]
    any_of_other = started(store.drop_select, None)
    assert all(one.is_waiting(0.03) for one in waiting)
    store.insert(*entry([2, 1, 0]), extra=b"e")
    assert waiting[1].result().tokens.tolist() == [2, 1, 0]
    assert waiting[0].is_waiting(0.03) and waiting[2].is_waiting(0.03) and any_of_other.is_waiting(0.03)
    store.insert(*entry([3]), extra=b"e")
    assert waiting[2].result().tokens.tolist() == [3]
    store.insert(*entry([1]), extra=b"e")
    waiting[0].result()
    store.insert(*entry([1]))
    any_of_other.result()


def test_no_wake_up_is_lost_between_those_who_wait_for_room_and_for_entries(joined, entry, started):
    parts = entry([1, 2])
    store = joined.store(bytes_of(parts))
    takers = [started(store.drop_select, [1, 2]) for _ in range(10)]
    putters = [started(store.insert, *parts) for _ in range(10)]
    ids = sorted(one.result() for one in putters)
    assert sorted(one.result().header.entry_id for one in takers) == ids
    assert store.bytes_used == 0


def test_an_entry_goes_to_one_of_many_racing_callers(joined, entry, started):
    store = joined.store()
    callers = [started(store.drop_select, [n % 7], timeout=3) for n in range(35)]
    for round_ in range(2):
        for n in range(7):
            store.insert(*entry([n, round_]))
    won = []
    for caller in callers:
        try:
            won.append(caller.result().header.entry_id)
        except TimeoutError:
            pass
    assert len(won) == 14 and len(set(won)) == 14


def test_a_negative_timeout_is_refused(joined):
    store = joined.store()
    with pytest.raises(ValueError, match="timeout"):
        store.drop_select([1], timeout=-1)


# -- events ------------------------------------------------------------------------------------


def test_a_listener_gets_a_snapshot_and_then_every_change_without_a_gap(joined, entry):
    store = joined.store()
    store.insert(*entry([1, 2], roi=[True, False]), extra=b"e")
    store.insert(*entry([3]))
    store.drop_select([3])
    events, follower = [], Follower()
    unsubscribe = store.subscribe(events.append)
    assert isinstance(events[0], Snapshot) and events[0].count == 1
    store.insert(*entry([4, 5]))
    store.drop_select(None)
    unsubscribe()
    store.insert(*entry([6]))
    assert all(follower.accept(event) for event in events) and follower.ready
    seen = [(type(e), e.entry_id) for e in events[1:]]
    assert seen == [(Stored, 1), (Stored, 3), (Removed, 3)]
    assert list(events[1].token_ids) == [1] and events[1].extra == b"e"


def test_events_are_in_order_and_complete_under_many_threads(joined, entry, started):
    store = joined.store()
    events, follower, held = [], Follower(), set()

    def work(n):
        for i in range(40):
            store.insert(*entry([n, i], layers=1))
            if i % 3:
                store.drop_select([n], timeout=5)

    workers = [started(work, n) for n in range(4)]
    store.subscribe(events.append)
    for worker in workers:
        worker.result(30)
    for event in events:
        assert follower.accept(event)
        if isinstance(event, Stored):
            held.add(event.entry_id)
        elif isinstance(event, Removed):
            held.remove(event.entry_id)
    assert len(held) == len(store) == 4 * 14


def test_an_insert_has_told_every_listener_when_it_returns(joined, entry, started):
    store = joined.store()
    told = set()
    store.subscribe(lambda event: told.add(getattr(event, "entry_id", None)))

    def work(n):
        return all(store.insert(*entry([n, i], layers=1)) in told for i in range(100))

    assert all(worker.result(30) for worker in [started(work, n) for n in range(3)])


def test_a_listener_that_raises_disturbs_nobody(joined, entry, caplog):
    store = joined.store()
    events = []

    def bad(event):
        raise RuntimeError("no")

    store.subscribe(bad)
    store.subscribe(events.append)
    store.insert(*entry([1]))
    assert [type(e) for e in events] == [Snapshot, Stored]
    assert "a listener of a lookup store failed" in caplog.text


# -- clearing ----------------------------------------------------------------------------------


def test_a_cleared_store_is_empty_and_has_said_so(joined, entry):
    store = joined.store()
    ids = [store.insert(*entry(tokens)) for tokens in ([1, 2], [1, 2, 3], [9])]
    events, follower = [], Follower()
    store.subscribe(events.append)
    assert store.clear() == 3
    assert (len(store), store.bytes_used, store.match([1, 2, 3])) == (0, 0, 0)
    gone = [event for event in events if isinstance(event, Removed)]
    assert [(event.entry_id, event.reason) for event in gone] == [(i, RemovalReason.CLEARED) for i in ids]
    assert store.clear() == 0
    store.insert(*entry([1, 2]))
    assert all(follower.accept(event) for event in events) and follower.ready
    assert isinstance(events[-1], Stored) and store.match([1, 2]) == 2
    late = []
    store.subscribe(late.append)
    assert late[0].count == 1


def test_who_reads_an_entry_reads_on_when_it_is_cleared_and_gives_its_room_back(joined, entry):
    parts = entry([1, 2, 3], layers=3)
    store = joined.store(bytes_of(parts))
    store.insert(*parts)
    removed, layers = [], []

    class Sink:
        def begin(self, header):
            pass

        def layer(self, index, key, value):
            if index == 1:
                assert store.clear() == 1
                assert (len(store), store.match([1, 2, 3])) == (0, 0)
                with pytest.raises(EntryGoneError):
                    store.select([1, 2, 3])
                assert store.bytes_used == bytes_of(parts)  # its memory is read
                with pytest.raises(TimeoutError, match="0 entries"):
                    store.insert(*entry([4]), timeout=0)
            layers.append(key.clone())

    store.subscribe(removed.append)
    store.select([1, 2, 3], sink=Sink())
    assert torch.equal(torch.stack(layers), parts[2])
    assert [event.reason for event in removed if isinstance(event, Removed)] == [RemovalReason.CLEARED]
    assert (len(store), store.bytes_used) == (0, 0)
    store.insert(*parts, timeout=0)


def test_inserts_that_wait_for_room_end_when_the_store_is_cleared(joined, entry, started, eventually):
    parts = entry([1, 2, 3])
    store = joined.store(bytes_of(parts))
    store.insert(*parts)
    waiting = [started(store.insert, *entry([n, 2, 3]), timeout=None) for n in (4, 5)]
    eventually(lambda: len(store._lending._room._waiters) == 2)
    store.clear()
    for one in waiting:
        with pytest.raises(EntryGoneError, match="cleared"):
            one.result()
    assert (len(store), store.bytes_used) == (0, 0)


def test_an_insert_does_not_wait_for_the_room_of_a_cleared_entry_that_is_read_on(
    joined, entry, started, eventually
):
    parts = entry([1, 2, 3], layers=2)
    store = joined.store(bytes_of(parts))
    store.insert(*parts)
    ended = []

    class Sink:
        def begin(self, header):
            waiting = started(store.insert, *entry([4, 5, 6], layers=2), timeout=None)
            eventually(lambda: store._lending._room._waiters)
            store.clear()
            with pytest.raises(EntryGoneError, match="cleared"):
                waiting.result()
            ended.append(store.bytes_used)

        def layer(self, index, key, value):
            pass

    store.select([1, 2, 3], sink=Sink())
    assert ended == [bytes_of(parts)]


def test_an_insert_that_copies_while_the_store_is_cleared_stores_nothing(joined, entry, monkeypatch):
    store = joined.store()
    events = []
    store.subscribe(events.append)
    copy_of = stores.copy_of

    def clear_and_copy(*args):
        store.clear()
        return copy_of(*args)

    monkeypatch.setattr(stores, "copy_of", clear_and_copy)
    with pytest.raises(EntryGoneError, match="cleared"):
        store.insert(*entry([1, 2]))
    assert (len(store), store.bytes_used, store.match([1, 2])) == (0, 0, 0)
    assert not [event for event in events if isinstance(event, Stored)]


def test_who_waits_to_take_an_entry_gets_one_that_comes_after_the_store_was_cleared(joined, entry, started):
    store = joined.store()
    waiting = started(store.drop_select, [1, 2])
    assert waiting.is_waiting()
    store.insert(*entry([9]))
    assert store.clear() == 1
    assert waiting.is_waiting()
    entry_id = store.insert(*entry([1, 2]))
    assert waiting.result().header.entry_id == entry_id


def test_inserts_readers_and_clears_at_once_leave_nothing_that_was_there_before(joined, entry, started):
    store = joined.store(6 * bytes_of(entry([0, 0])))  # some have to wait
    events, follower, held, cleared, read = [], Follower(), set(), [], []
    store.subscribe(events.append)

    class WhenPutIn:
        """Metadata that is asked for inside the insert: how many clears had returned by then."""

        def keys(self):
            return ["cleared"]

        def __getitem__(self, key):
            return len(cleared)

    def put(n):
        for i in range(80):
            with contextlib.suppress(EntryGoneError):
                store.insert(*entry([n, i], layers=2), metadata=WhenPutIn(), timeout=20)

    def take_a_look(n):
        while not all(putter.outcome for putter in putters):
            before = len(cleared)
            with contextlib.suppress(EntryGoneError):
                got = store.select([n])
                read.append(got.header.entry_id)
                assert got.header.metadata["cleared"] >= before - 1  # one may be about to return

    def clear():
        while not all(putter.outcome for putter in putters):
            store.clear()
            cleared.append(None)
            time.sleep(0.001)

    putters = [started(put, n) for n in range(3)]
    for other in [started(take_a_look, n) for n in range(3)] + [started(clear), *putters]:
        other.result(60)
    assert read and cleared
    store.clear()
    assert (len(store), store.bytes_used) == (0, 0)
    for event in events:
        assert follower.accept(event)
        if isinstance(event, Stored):
            held.add(event.entry_id)
        elif isinstance(event, Removed):
            held.remove(event.entry_id)
    assert not held and follower.ready


# -- ending ------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["close", "abort"])
def test_whoever_waits_when_the_store_ends_gets_closed_error(joined, entry, started, end):
    parts = entry([1, 2])
    store = joined.store(bytes_of(parts))
    store.insert(*parts)
    waiting = [started(store.insert, *parts), started(store.drop_select, [9])]
    assert all(one.is_waiting(0.05) for one in waiting)
    getattr(store, end)()
    for one in waiting:
        with pytest.raises(ClosedError):
            one.result()
    calls = (
        lambda: store.insert(*parts),
        lambda: store.match([1]),
        lambda: store.select([1]),
        lambda: store.drop_select(None),
        lambda: store.subscribe(print),
        store.clear,
        lambda: joined.reach(store),
    )
    for call in calls:
        with pytest.raises(ClosedError):
            call()
    store.close()
    store.abort()
    assert len(store) == 0 and store.bytes_used == 0


def test_a_forked_child_finds_the_store_closed(joined, entry):
    store = joined.store()
    store.insert(*entry([1]))
    with store._lending._lock:  # as if another thread held it when this one forks
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                store.match([1])
            except ClosedError:
                code = 0
            finally:
                os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert store.match([1]) == 1


@pytest.mark.parametrize("extra", ["text", 3, None])
def test_an_extra_that_is_not_bytes_is_refused(joined, entry, extra):
    store = joined.store()
    for call in (lambda: store.insert(*entry([1]), extra=extra), lambda: store.match([1], extra=extra)):
        with pytest.raises(UnsupportedError, match="extra must be bytes"):
            call()
    assert store.bytes_used == 0
