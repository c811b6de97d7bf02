"""What is particular to the store "simple". The laws that it keeps are in test_simple_contract.py."""

from __future__ import annotations

import os

import pytest
import torch

from kvplug import CapacityError, ClosedError, TimeoutError, UnsupportedError

M61 = 2**61 - 1


def bytes_of(parts):
    tokens, _, *rest = parts
    return 9 * len(tokens) + sum(part.nbytes for part in rest if part is not None)


# -- what is refused ---------------------------------------------------------------------------


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


def test_old_entries_go_when_room_is_needed_even_during_the_wait(joined, entry):
    parts = entry([1, 2, 3])
    store = joined.store(bytes_of(parts), ttl_s=0.15)
    store.insert(*parts)
    with pytest.raises(TimeoutError):
        store.insert(*entry([4, 5, 6]), timeout=0)
    assert store.match([1, 2, 3]) == 3
    store.insert(*entry([4, 5, 6]), timeout=5)
    assert store.match([1, 2, 3]) == 0 and store.match([4, 5, 6]) == 3


# -- eviction ----------------------------------------------------------------------------------


def test_where_the_oldest_go_an_insert_finds_room_and_what_is_read_stays(joined, entry):
    parts = entry([1, 2, 3], layers=2)
    store = joined.store(3 * bytes_of(parts), evict="oldest")
    for first in (1, 4, 7):
        store.insert(*entry([first, 2, 3], layers=2), timeout=0)
    held, layers = [], []

    class Sink:
        def begin(self, header):
            for first in (10, 13):
                store.insert(*entry([first, 2, 3], layers=2), timeout=0)
            held.extend(first for first in (1, 4, 7, 10, 13) if store.match([first]))

        def layer(self, index, key, value):
            layers.append(key.clone())

    store.select([1, 2, 3], sink=Sink())
    assert held == [1, 10, 13], "1 is being read, 4 and 7 are the oldest others"
    assert torch.equal(torch.stack(layers), parts[2])
    store.insert(*entry([16, 2, 3], layers=2), timeout=0)
    assert store.match([1]) == 0, "it is not read any more"


def test_nothing_goes_for_an_entry_that_would_not_fit_even_so(joined, entry):
    parts = entry([1, 2, 3], layers=2)
    store = joined.store(2 * bytes_of(parts), evict="oldest")
    store.insert(*entry([1, 2, 3], layers=2))
    store.insert(*parts)

    class Sink:
        def begin(self, header):
            with pytest.raises(TimeoutError):
                store.insert(*entry([9] * 6, layers=2), timeout=0)

        def layer(self, index, key, value):
            pass

    store.select([1, 2, 3], sink=Sink())
    assert len(store) == 2


# -- ending ------------------------------------------------------------------------------------


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
