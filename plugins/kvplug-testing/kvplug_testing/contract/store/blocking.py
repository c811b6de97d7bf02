"""The suite of the methods of a blocking store: :class:`BlockingStoreContract`.

It calls them as the executor does, and needs no engine, so that a failure names the method that is wrong.
:class:`~kvplug_testing.contract.store.StoreContract` judges the whole store that the executor makes of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final

import pytest

from kvplug import UnsupportedError
from kvplug.transport import BlockingStore, Usage
from kvplug_testing.contract.base import law
from kvplug_testing.contract.store.suite import Place, StoreSuite
from kvplug_testing.contract.suite_ref import suite_from_ref
from kvplug_testing.peers import Parent
from kvplug_testing.waits import Call

MIB: Final = 1 << 20
_KEYS: Final = [bytes([number]) * 32 for number in range(1, 9)]
_SIZES: Final = (1, 4096, 2 * MIB + 3)
_NUM_THREADS: Final = 4
_DELAYS_S: Final = (0.0, 0.001, 0.003, 0.01, 0.03)
"""How long writers work before they are killed."""
_ENOUGH_S: Final = 60.0


class BlockingStoreContract(StoreSuite):
    """Checks the methods of a blocking store against the laws STORE that they keep alone.

    A test file is this; without an installed store, override ``make_store(context)``::

        from kvplug_testing import BlockingStoreContract

        class TestMine(BlockingStoreContract):
            store = "mine"
    """

    def raw(self, place: Place | None = None) -> BlockingStore:
        """A blocking store, closed at the end of the test."""
        made = self.make_store(self.context(place or self.place()))
        assert isinstance(made, BlockingStore), f"the factory made {made!r}, which is not a BlockingStore"
        self.later(made.close)
        return made

    # -- what is written is read -----------------------------------------------------------------

    @law("STORE-1")
    @pytest.mark.parametrize("nbytes", _SIZES)
    def test_what_is_written_is_read_whatever_buffers_it_comes_from_and_goes_to(self, nbytes: int) -> None:
        store, page = self.raw(), _page(1, nbytes)
        assert store.write(_KEYS[0], _cut(page, 3)) is True
        for num_parts in (1, 2, 5):
            assert _read(store, _KEYS[0], nbytes, num_parts) == page
        for other in (max(1, nbytes // 2), nbytes + 100):  # a header is read first; the page may be another's
            into = bytearray(other)
            assert store.read(_KEYS[0], [memoryview(into)]) == nbytes, "read returns the length of the page"
            assert into[:nbytes] == page[:other], "the buffers are filled from the page's first byte on"

    @law("STORE-10")
    def test_has_answers_in_the_order_of_the_keys_and_an_absent_page_is_none(self) -> None:
        store = self.raw()
        for key in _KEYS[::2]:
            store.write(key, [memoryview(_page(key[0], 1000))])
        assert [*store.has(_KEYS)] == [key in _KEYS[::2] for key in _KEYS]
        assert [*store.has([])] == []
        into = bytearray(b"as it was")
        assert store.read(_KEYS[1], [memoryview(into)]) is None
        assert into == b"as it was"

    @law("STORE-2")
    def test_the_first_whole_write_of_a_key_wins(self) -> None:
        store, first = self.raw(), _page(1, 5000)
        assert store.write(_KEYS[0], [memoryview(first)]) is True
        assert store.write(_KEYS[0], [memoryview(_page(2, 5000))]) is True, "the page is there"
        assert _read(store, _KEYS[0], 5000) == first

    @law("STORE-2")
    def test_writers_of_one_key_leave_the_page_of_one_and_readers_see_nothing_else(self) -> None:
        store, key = self.raw(), _KEYS[0]
        pages = [_page(number, MIB) for number in range(1, _NUM_THREADS + 1)]
        seen: list[bytes] = []

        def look() -> None:
            until = time.monotonic() + 10
            while len(seen) < 3 and time.monotonic() < until:
                if store.has([key])[0]:
                    seen.append(_read(store, key, MIB))

        def write(page: bytes) -> None:
            at_once.wait(10)
            store.write(key, _cut(page, 7))

        at_once = threading.Barrier(_NUM_THREADS)
        for call in [Call(look), *(Call(partial(write, page)) for page in pages)]:
            call.result()
        assert seen, "no reader has found the page"
        assert all(each in pages for each in seen), "a reader got a mixture, or a part"
        assert len({*seen, _read(store, key, MIB)}) == 1, "a page that is there was replaced"

    # -- forgetting ------------------------------------------------------------------------------

    @law("STORE-9")
    def test_a_removed_page_is_absent_and_can_be_written_again(self) -> None:
        store = self.raw()
        for key in _KEYS[:3]:
            store.write(key, [memoryview(_page(1, 1000))])
        with _supported("remove"):
            store.remove([_KEYS[7], *_KEYS[:2]])  # the first is not there
        assert [*store.has(_KEYS[:3])] == [False, False, True]
        assert store.read(_KEYS[0], [memoryview(bytearray(10))]) is None
        store.write(_KEYS[0], [memoryview(_page(2, 1000))])
        assert _read(store, _KEYS[0], 1000) == _page(2, 1000)

    @law("STORE-9")
    def test_clear_forgets_all_pages(self) -> None:
        store = self.raw()
        for key in _KEYS:
            store.write(key, [memoryview(_page(1, 1000))])
        with _supported("clear"):
            store.clear()
        assert not any(store.has(_KEYS))
        assert store.write(_KEYS[0], [memoryview(_page(2, 1000))]) is True

    @law("STORE-10")
    def test_keys_and_usage_count_what_is_there(self) -> None:
        store = self.raw()
        assert isinstance(store.usage(), Usage)
        for key in _KEYS[:4]:
            store.write(key, [memoryview(_page(1, 1000))])
        store.touch([*_KEYS])  # also those that are absent
        if store.usage().num_pages:  # else the store does not count
            assert store.usage().num_pages == 4
            assert store.usage().used_bytes >= 4000
        with _supported("keys"):
            found = store.keys(bytes(32))
        assert {*found} <= {*_KEYS[:4]}, "keys names a page that is not there"

    # -- ends ------------------------------------------------------------------------------------

    @law("STORE-2", "ALL-2", needs="other_and_forked_processes")
    def test_a_writer_that_is_killed_leaves_whole_pages_and_no_others(self) -> None:
        place = self.place()
        store = self.raw(place)
        if not store.is_shared:
            pytest.skip(f"{self.called} is not shared (is_shared)")
        for number, delay_s in enumerate(_DELAYS_S):
            child = self.start_forked(f"{__name__}:write_for_ever", self.suite_ref(), place.plain, number)
            child.recv()
            time.sleep(delay_s)
            child.kill()
            for key in _keys_of(number):
                if store.has([key])[0]:
                    assert _read(store, key, MIB) == _page(number, MIB), "a part of a page is there"
        assert store.write(b"\xff" * 32, [memoryview(_page(1, 1000))]) is True

    @law("ALL-1")
    def test_closing_twice_is_closing_once(self) -> None:
        store = self.raw()
        store.write(_KEYS[0], [memoryview(_page(1, 1000))])
        store.close()
        store.close()


def write_for_ever(
    parent: Parent, suite_ref: Mapping[str, Any], place: Mapping[str, Any], number: int
) -> None:
    """In a process that is killed: write pages, one after the other."""
    suite = suite_from_ref(suite_ref)
    with contextlib.ExitStack() as suite._stack:
        store, page = suite.raw(Place(**place)), _cut(_page(number, MIB), 16)
        parent.send("ready")
        for key in _keys_of(number):
            store.write(key, page)
        time.sleep(_ENOUGH_S)


def _keys_of(number: int) -> list[bytes]:
    """The keys that a process writes."""
    return [bytes([number + 1, at]) * 16 for at in range(20)]


def _page(number: int, nbytes: int) -> bytes:
    """Bytes without a pattern, others for each number."""
    return hashlib.shake_128(bytes([number])).digest(nbytes)


def _cut(page: bytes, num_parts: int) -> list[memoryview]:
    cuts = [len(page) * at // num_parts for at in range(num_parts + 1)]
    return [memoryview(page)[begin:end] for begin, end in pairwise(cuts)]


def _read(store: BlockingStore, key: bytes, nbytes: int, num_parts: int = 1) -> bytes:
    into = bytearray(nbytes)
    cuts = [nbytes * at // num_parts for at in range(num_parts + 1)]
    parts: Sequence[memoryview] = [memoryview(into)[begin:end] for begin, end in pairwise(cuts)]
    assert store.read(key, parts) == nbytes
    return bytes(into)


@contextlib.contextmanager
def _supported(method: str) -> Iterator[None]:
    """Skip the test if the store cannot do that."""
    try:
        yield
    except UnsupportedError as e:
        pytest.skip(f"{method}: {e}")
