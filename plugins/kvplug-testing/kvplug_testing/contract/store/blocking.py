"""The suite of the methods of a blocking store: :class:`BlockingStoreContract`.

It calls them as the executor does, and needs no engine, so that a failure names the method that is wrong.
:class:`~kvplug_testing.contract.store.StoreContract` judges the whole store that the executor makes of it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from functools import partial
from itertools import pairwise
from typing import Final

import pytest

from kvplug import UnsupportedError
from kvplug.transport import BlockingStore
from kvplug_testing.contract.base import law
from kvplug_testing.contract.store.pages import MIB, randbytes
from kvplug_testing.contract.store.suite import StoreSuite
from kvplug_testing.waits import Call

_KEYS: Final = [bytes([number]) * 32 for number in range(1, 9)]
_ENOUGH_S: Final = 10.0


class BlockingStoreContract(StoreSuite):
    """Checks the methods of a blocking store against the laws STORE that they keep alone.

    A test file is this; without an installed store, override ``make_store(context)``::

        from kvplug_testing import BlockingStoreContract

        class TestMine(BlockingStoreContract):
            store = "mine"
    """

    def raw(self) -> BlockingStore:
        """A blocking store, closed at the end of the test."""
        made = self.make_store(self.context(self.place()))
        assert isinstance(made, BlockingStore), f"the factory made {made!r}, which is not a BlockingStore"
        self.later(made.close)
        return made

    @law("STORE-1")
    @pytest.mark.parametrize("nbytes", [1, 4096, 2 * MIB + 3])
    def test_what_is_written_is_read_whatever_buffers_it_comes_from_and_goes_to(self, nbytes: int) -> None:
        store, page = self.raw(), randbytes(1, nbytes)
        assert store.write(_KEYS[0], _cut(page, 3)) is True
        for num_parts in (1, 2, 5):
            assert _read(store, _KEYS[0], nbytes, num_parts) == page
        for other in (max(1, nbytes // 2), nbytes + 100):  # a header is read first; the page may be another's
            into = bytearray(other)
            assert store.read(_KEYS[0], [memoryview(into)]) == nbytes, "read returns the length of the page"
            assert into[:nbytes] == page[:other], "the buffers are filled from the page's first byte on"

    @law("STORE-1")
    @pytest.mark.parametrize("nbytes", [4096, MIB + 3])
    def test_several_pages_in_one_call_are_those_of_single_calls(self, nbytes: int) -> None:
        store = self.raw()
        pages = {key: randbytes(key, nbytes) for key in _KEYS[:4]}
        store.write(_KEYS[0], _cut(pages[_KEYS[0]], 1))
        again = store.write_pages(_KEYS[:3], [_cut(pages[key], 3) for key in _KEYS[:3]])
        assert [*again] == [True] * 3, "the pages are there"
        store.write(_KEYS[3], _cut(pages[_KEYS[3]], 2))
        memory, found = bytearray(nbytes), {}
        for index, length in store.read_pages(_KEYS[:6], [_cut(memory, 2)] * 6):
            assert index not in found, "a page comes once"
            found[index] = length
            assert length is None or memory == pages[_KEYS[index]], "the buffers hold the page that comes"
        assert found == {**dict.fromkeys(range(4), nbytes), 4: None, 5: None}

    @law("STORE-10")
    def test_has_answers_in_the_order_of_the_keys_and_an_absent_page_is_none(self) -> None:
        store = self.raw()
        for key in _KEYS[::2]:
            store.write(key, [memoryview(randbytes(key, 1000))])
        store.touch([*_KEYS])  # also those that are absent
        assert [*store.has(_KEYS)] == [key in _KEYS[::2] for key in _KEYS]
        assert [*store.has([])] == []
        into = bytearray(b"as it was")
        assert store.read(_KEYS[1], [memoryview(into)]) is None
        assert into == b"as it was"

    @law("STORE-2")
    def test_the_first_whole_write_of_a_key_wins_and_readers_see_nothing_else(self) -> None:
        store, key = self.raw(), _KEYS[0]
        pages = [randbytes(number, MIB) for number in range(4)]
        at_once = threading.Barrier(len(pages))
        seen: list[bytes] = []

        def look() -> None:
            until = time.monotonic() + _ENOUGH_S
            while len(seen) < 3 and time.monotonic() < until:
                if store.has([key])[0]:
                    seen.append(_read(store, key, MIB))

        def write(page: bytes) -> None:
            at_once.wait(_ENOUGH_S)
            assert store.write(key, _cut(page, 7)) is True, "the page is there"

        for call in [Call(look), *(Call(partial(write, page)) for page in pages)]:
            call.result()
        assert seen, "no reader has found the page"
        assert all(each in pages for each in seen), "a reader got a mixture, or a part"
        assert store.write(key, [memoryview(randbytes("late", MIB))]) is True, "the page is there"
        assert {*seen} == {_read(store, key, MIB)}, "a page that is there was replaced"

    @law("STORE-9")
    def test_a_removed_page_is_absent_and_can_be_written_again(self) -> None:
        store = self.raw()
        for key in _KEYS[:3]:
            store.write(key, [memoryview(randbytes(key, 1000))])
        try:
            store.remove([_KEYS[7], *_KEYS[:2]])  # the first is not there
        except UnsupportedError as e:
            pytest.skip(f"remove: {e}")
        assert [*store.has(_KEYS[:3])] == [False, False, True]
        assert store.read(_KEYS[0], [memoryview(bytearray(10))]) is None
        store.write(_KEYS[0], [memoryview(randbytes("again", 1000))])
        assert _read(store, _KEYS[0], 1000) == randbytes("again", 1000)
        with contextlib.suppress(UnsupportedError):
            store.clear()
            assert not any(store.has(_KEYS))
            assert store.write(_KEYS[0], [memoryview(randbytes(0, 1000))]) is True

    @law("ALL-1")
    def test_closing_twice_is_closing_once(self) -> None:
        store = self.raw()
        store.write(_KEYS[0], [memoryview(randbytes(1, 1000))])
        store.close()
        store.close()


def _cut(page: bytes | bytearray, num_parts: int) -> list[memoryview]:
    cuts = [len(page) * at // num_parts for at in range(num_parts + 1)]
    return [memoryview(page)[begin:end] for begin, end in pairwise(cuts)]


def _read(store: BlockingStore, key: bytes, nbytes: int, num_parts: int = 1) -> bytes:
    into = bytearray(nbytes)
    assert store.read(key, _cut(into, num_parts)) == nbytes
    return bytes(into)
