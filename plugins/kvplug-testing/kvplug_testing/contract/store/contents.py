"""What is got is what was put, and else a miss: dtypes, sizes, wrong bytes, forged pages, other tenants."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import attrs
import pytest

from kvplug.kit import DTYPES, Part
from kvplug.transport import MissReason, PageFormat, PageSeal, Store
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.store.calls import ended, got, got_or_missed, held, kept, missed
from kvplug_testing.contract.store.ends import StoreGeneral, pages_of
from kvplug_testing.contract.store.pages import FILL, MIB, Batch, found, held_request, kv_format, sized_format
from kvplug_testing.contract.store.suite import Place
from kvplug_testing.waits import Call

_BAD = 1
"""The page that is not right, of a few."""
_OTHER_HEADER = {MissReason.FORMAT, MissReason.CORRUPT}


def _turned(at: int, page: bytes) -> bytes:
    """The page with one bit turned."""
    changed = bytearray(page)
    changed[at] ^= 1 << (at % 8)
    return bytes(changed)


_WRONG: dict[str, tuple[Callable[[bytes], bytes | None], set[MissReason]]] = {
    **{f"byte {at}": (partial(_turned, at), _OTHER_HEADER) for at in (0, 4, 8, 16, 24, 40)},
    "byte 65": (partial(_turned, 65), {MissReason.IDENTITY, MissReason.CORRUPT}),
    **{f"byte {at}": (partial(_turned, at), {MissReason.CORRUPT}) for at in (-600, -512, -200, -1)},
    "zeros at the end": (lambda page: page[:-100] + bytes(100), {MissReason.CORRUPT}),
    "one byte less": (lambda page: page[:-1], {MissReason.CORRUPT}),
    "part of the header": (lambda page: page[:50], _OTHER_HEADER),
    "nothing": (lambda page: b"", _OTHER_HEADER),
    "lost": (lambda page: None, {*MissReason}),
    "one byte more": (lambda page: page + b"x", {MissReason.CORRUPT}),
}
"""Changes of a page of 16 layers with checksums (600 bytes before the end is one), and the reasons. A bit
is turned of the magic number, the version, both lengths, the format, the series and the identity."""


_PAGES = 8
_OPENERS = 4
"""Threads that open one place at once."""
_OPENINGS = 5
"""Places that they open, one after the other."""
_KILLS = 8


def _every_dtype() -> PageFormat:
    parts = (Part(name=dtype, dtype=dtype, shape=(4, 2, 6), head_axis=1) for dtype in DTYPES)
    flags = Part(name="flags", dtype="bool", shape=(3,), token_axis=None)
    return PageFormat(page_tokens=4, num_layers=7, parts=(*parts, flags))


class Contents(StoreGeneral):
    """Every page has random bytes, which are compared bit for bit. A bad page hides no other, and a page is
    there whole or not at all: writers race, and writers are killed.
    """

    @law("STORE-1")
    def test_pages_of_each_size_and_dtype_come_back_in_any_order(self, end: str) -> None:
        first, store = self.first_and(end)
        sizes = [(3, sized_format(nbytes)) for nbytes in (1, 4095, 4096, 65537, 8 * MIB + 13)]
        for count, form in ((5, _every_dtype()), (200, kv_format()), *sizes):
            for writer, reader in ((first, store), (store, first)):
                pages = self.batch(first, count, form)
                kept(writer, pages)
                got(reader, pages)
                got(reader, pages[[*range(count - 1, 0, -2), 1, 1]])

    @law("STORE-1", "STORE-2", "STORE-6", "STORE-8", "STORE-9", "STORE-10", timeout_s=120)
    def test_random_calls_give_what_a_dict_gives(self, end: str) -> None:
        from kvplug_testing.contract.random_calls import run_machine
        from kvplug_testing.contract.store.machine import StoreMachine

        run_machine(lambda: StoreMachine(self, *self.first_and(end, 64 * MIB)), examples=8, steps=30)

    @law("STORE-1")
    def test_a_page_of_other_tokens_or_format_under_the_same_key_is_a_miss(self, end: str) -> None:
        first, store, pages = self.with_pages(end)
        others = attrs.evolve(pages, identities=tuple(_turned(-1, each) for each in pages.identities))
        missed(store, others, MissReason.IDENTITY)
        for form, shard in (
            (kv_format(3), b""),
            (kv_format(dtype="bfloat16"), b""),
            (kv_format(), b"1 of 2"),
        ):
            pages, others = self.batch(first, 3), self.batch(store, 3, form, shard=shard)
            kept(first, pages)
            others = attrs.evolve(others, keys=pages.keys, identities=pages.identities)
            missed(store, others, MissReason.FORMAT)

    @law("STORE-1")
    def test_a_wrong_or_lost_page_is_a_miss_and_makes_room_for_the_right_one(self, end: str) -> None:
        first, store = self.first_and(end)
        for change, (alter, reasons) in _WRONG.items():
            pages = self.batch(first, 3, kv_format(16, num_heads=1, head_size=2))
            kept(first, pages)
            assert all(held(store, pages))
            self._alter(first, pages, _BAD, alter)
            request = pages.empty()
            results = ended(store.submit_get(request))
            assert results[0] is results[2] is None, f"{change}: other pages are missed"
            assert results[_BAD] in reasons, f"{change}: it is a miss for the reason {results[_BAD]}"
            assert not (wrong := pages.unlike(request, results)), wrong
            there = zip(found(request)[_BAD], pages.contents[_BAD], strict=True)
            left = [at for at, (byte, right) in enumerate(there) if byte not in {0, FILL, right}]
            assert not left, f"{change}: the missed page's memory holds wrong bytes, at {left}"
            if change == "lost":
                assert held(store, pages) == [True, False, True], "a page that was missed is promised"
            kept(store, pages)
            got(store, pages)

    @law("STORE-1")
    def test_no_layer_is_released_before_it_is_verified_for_all_pages(self) -> None:
        """A wrong byte in a late layer of one page: that layer, and those after it, are not released."""
        _, store, pages = self.with_pages("first", 6, kv_format(24, num_heads=4, head_size=64))
        step, bad_layer = pages.form.layer_nbytes, 9
        self._alter(store, pages, 4, partial(_turned, bad_layer * step - pages.form.nbytes))
        request = pages.empty()
        job = store.submit_get(request)
        while True:
            ready = job.num_layers_ready
            if job.results() is not None:  # looked at last: then all layers are released
                break
            assert ready <= bad_layer, f"layer {bad_layer} is wrong, and {ready} layers were released"
            for index, (there, content) in enumerate(zip(found(request), pages.contents, strict=True)):
                is_there = there[: ready * step] == content[: ready * step]
                assert is_there, f"page {index} is not there in {ready} layers"
        results = ended(job)
        assert results == [*[None] * 4, MissReason.CORRUPT, None]
        assert not (wrong := pages.unlike(request, results)), wrong

    def _alter(self, store: Store, pages: Batch, index: int, alter: Callable[[bytes], bytes | None]) -> None:
        page = self.read_raw(store, pages.keys[index])
        assert page is not None, "a page that was kept cannot be read behind the store's back"
        self.write_raw(store, pages.keys[index], alter(page))

    # -- tenants -------------------------------------------------------------------------------

    @law("STORE-4", "STORE-1")
    def test_a_forged_or_misplaced_page_is_a_miss(self, end: str) -> None:
        first, store, pages = self.with_pages(end, 2, secret=b"of the deployment")
        page, misplaced = (self.read_raw(first, key) for key in pages.keys)
        assert page is not None
        self.write_raw(first, pages.keys[0], misplaced)
        missed(store, pages[:1], MissReason.IDENTITY)
        if store.seal.secret is None:
            return  # no stranger can write to it: its pages need no proof
        length = store.seal.header_length(pages.form, pages.identities[0])
        other = pages.with_bits_of("a stranger")
        forged = other.page(0, attrs.evolve(store.seal, secret=b"a guess"))
        proofless, content = forged[: length - 32], other.contents[0]
        for forgery, *reasons in (
            (forged, MissReason.FORGED),
            (other.page(0, PageSeal()), MissReason.FORMAT, MissReason.FORGED, MissReason.CORRUPT),
            (proofless + page[length - 32 : length] + content, MissReason.FORGED),
            (proofless + bytes(32) + content, MissReason.FORGED),
        ):
            self.write_raw(first, pages.keys[0], forgery)
            missed(store, pages[:1], *reasons)
        kept(store, pages)
        got(store, pages)

    # -- writers that race, and writers that die ----------------------------------------------

    @law("STORE-2")
    def test_of_two_writers_with_different_bits_one_wins_wholly(self, end: str) -> None:
        first, store = self.first_and(end)
        for _ in range(10):
            pages = self.batch(first, _PAGES, sized_format(30_000))
            writers = [pages.with_bits_of(seed) for seed in (1, 2)]
            requests = [writer.filled() for writer in writers]
            jobs = [end_.submit_put(each) for end_, each in zip((first, store), requests, strict=True)]
            for job in jobs:
                assert ended(job) == [None] * _PAGES
            seen = _contents(first, pages)
            assert seen == _contents(store, pages) == _contents(first, pages), "a page changed"
            for page, *written in zip(seen, *(writer.contents for writer in writers), strict=True):
                assert page in written, "a page is a mixture of two"

    @law("STORE-2")
    def test_ends_that_are_opened_at_once_in_several_threads_share_their_pages(self) -> None:
        if self.one_end:
            pytest.skip(self.one_end)

        def opened(place: Place, gate: threading.Barrier) -> tuple[Store, Batch]:
            gate.wait(waits.patience_s)
            store = self.other(place)
            pages = self.batch(store, 1)
            kept(store, pages)
            return store, pages

        for _ in range(_OPENINGS):
            with self.scope():
                place, gate = self.place(), threading.Barrier(_OPENERS)
                if self.by_link:
                    self.open(place)
                    self.make_reachable(place)
                calls = [Call(partial(opened, place, gate)) for _ in range(_OPENERS)]
                errors = [call.end().error for call in calls]
                assert not any(errors), f"an end that was opened with others at once fails: {errors}"
                there = [call.value for call in calls]
                for store, _ in there:
                    for _, pages in there:
                        got(store, pages)

    @law("STORE-2", "STORE-3")
    @pytest.mark.parametrize("cancelled", [False, True])
    def test_a_page_is_not_visible_before_it_is_whole(self, end: str, cancelled: bool) -> None:
        first, store = self.first_and(end)
        pages = self.batch(first, 3, sized_format(50_000))
        request, memory = held_request(pages, at=1, filled=True)
        with memory:
            job = (store if cancelled else first).submit_put(request)
            memory.wait_begun()
            if cancelled:
                Call(job.cancel).result()
                assert ended(job)[1] is not None
            else:
                assert held(store, pages)[1] is False, "a page that is being put is held already"
                missed(store, pages[1:2])
                got_or_missed(store, pages)
        assert cancelled or ended(job) == [None] * 3
        assert job.wait_settled(waits.patience_s)
        for end_ in (first, store):
            got_or_missed(end_, pages)
        kept(first, pages)
        got(store, pages)

    @law("STORE-2", "ALL-5", needs="other_and_forked_processes", timeout_s=300)
    def test_writers_that_are_killed_at_any_point_leave_whole_pages(self) -> None:
        place = self.place()
        store = self.open(place)
        for turn in range(_KILLS):
            writer, names = self.beside(place), [f"killed {turn}, put {at}" for at in range(3)]
            for name in names[:2]:
                writer.run("put", name)
            writer.begin("put", names[2])
            time.sleep(0.002 * turn)
            writer.child.kill()
            for name in names:
                pages = pages_of(place, name)
                if name == names[2]:
                    assert {*got_or_missed(store, pages)} <= {None, MissReason.ABSENT}
                    kept(store, pages)
                got(store, pages)
        if self.spec is not None and self.spec.persistent:
            Call(store.close).result()
            got(self.open(place), pages)


def _contents(store: Store, pages: Batch) -> list[bytes]:
    """The bytes of pages that are there."""
    request = pages.empty()
    assert ended(store.submit_get(request)) == [None] * len(pages)
    return found(request)
