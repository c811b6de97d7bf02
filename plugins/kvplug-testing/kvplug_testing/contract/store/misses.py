"""What is a miss, and for which reason: other pages, wrong bytes, forged pages, other tenants."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest

from kvplug.transport import MissReason, PageSeal, Store
from kvplug_testing.contract.base import law
from kvplug_testing.contract.store.pages import FILL, Batch, kv_format, sized_format
from kvplug_testing.contract.store.suite import (
    StoreSuite,
    at_both_ends,
    ended,
    got,
    held,
    kept,
    missed,
)

_FIXED = 56
"""Bytes of a header before the identity."""


def turned(page: bytes, at: int) -> bytes:
    """The page with one bit turned."""
    changed = bytearray(page)
    changed[at] ^= 1 << (at % 8)
    return bytes(changed)


def _zero_tail(page: bytes) -> bytes:
    """A page whose last writes were lost: its length is right, its last bytes are zeros."""
    return page[:-100] + bytes(100)


_WRONG: dict[str, tuple[Callable[[bytes], bytes], set[MissReason]]] = {
    "magic": (lambda page: turned(page, 0), {MissReason.FORMAT, MissReason.CORRUPT}),
    "version": (lambda page: turned(page, 4), {MissReason.FORMAT, MissReason.CORRUPT}),
    "header length": (lambda page: turned(page, 8), {MissReason.FORMAT, MissReason.CORRUPT}),
    "payload length": (lambda page: turned(page, 16), {MissReason.FORMAT, MissReason.CORRUPT}),
    "format": (lambda page: turned(page, 24), {MissReason.FORMAT, MissReason.CORRUPT}),
    "series": (lambda page: turned(page, 40), {MissReason.FORMAT, MissReason.CORRUPT}),
    "identity": (lambda page: turned(page, _FIXED + 9), {MissReason.IDENTITY, MissReason.CORRUPT}),
    "checksum": (lambda page: turned(page, -600), {MissReason.CORRUPT}),
    "first byte": (lambda page: turned(page, -512), {MissReason.CORRUPT}),
    "a byte in the middle": (lambda page: turned(page, -200), {MissReason.CORRUPT}),
    "last byte": (lambda page: turned(page, -1), {MissReason.CORRUPT}),
    "zeros at the end": (_zero_tail, {MissReason.CORRUPT}),
    "one byte less": (lambda page: page[:-1], {MissReason.CORRUPT}),
    "half of it": (lambda page: page[: len(page) // 2], {MissReason.CORRUPT, MissReason.FORMAT}),
    "part of the header": (lambda page: page[:50], {MissReason.CORRUPT, MissReason.FORMAT}),
    "nothing": (lambda page: b"", {MissReason.CORRUPT, MissReason.FORMAT}),
    "one byte more": (lambda page: page + b"x", {MissReason.CORRUPT}),
    "another page after it": (lambda page: page + page, {MissReason.CORRUPT}),
}
"""Changes of a page of 16 layers with checksums (600 bytes before the end is one), and the reasons."""


class Misses(StoreSuite):
    """No wrong byte is ever taken for a page."""

    @law("STORE-1")
    @at_both_ends
    def test_the_page_of_other_tokens_under_the_same_key_is_a_miss(self, end: str) -> None:
        first, store = self.first_and(end)
        pages = self.batch(first, 3)
        kept(first, pages)
        others = attrs.evolve(pages, identities=tuple(turned(each, -1) for each in pages.identities))
        missed(store, others, MissReason.IDENTITY)
        longer = attrs.evolve(pages, identities=tuple(each + b"\0" for each in pages.identities))
        missed(store, longer, MissReason.IDENTITY, MissReason.FORMAT, MissReason.ABSENT)

    @law("STORE-1")
    @at_both_ends
    @pytest.mark.parametrize("form", ["other layers", "other dtype", "other parts", "other shard"])
    def test_a_page_of_another_format_under_the_same_key_is_a_miss(self, end: str, form: str) -> None:
        first, store = self.first_and(end)
        pages = self.batch(first, 3)
        kept(first, pages)
        wanted = {
            "other layers": kv_format(3),
            "other dtype": kv_format(dtype="bfloat16"),
            "other parts": sized_format(pages.form.nbytes),
            "other shard": pages.form,
        }[form]
        series = self.batch(store, 1, wanted, shard=b"1 of 2" if form == "other shard" else b"").series
        contents = tuple(bytes(wanted.nbytes) for _ in pages.keys)
        missed(store, attrs.evolve(pages, series=series, contents=contents), MissReason.FORMAT)

    @law("STORE-1")
    @at_both_ends
    @pytest.mark.parametrize("change", _WRONG)
    def test_a_page_with_wrong_bytes_is_a_miss_and_makes_room_for_the_right_one(
        self, end: str, change: str
    ) -> None:
        first, store = self.first_and(end)
        pages = self.batch(first, 3, kv_format(16, num_heads=1, head_size=2))
        assert pages.form.nbytes == 512
        kept(first, pages)
        alter, reasons = _WRONG[change]
        self._alter(first, pages, 1, alter)
        request = pages.empty()
        results = ended(store.submit_get(request))
        assert results[0] is None
        assert results[2] is None
        assert results[1] in reasons, f"it is a miss for the reason {results[1]}, not {', '.join(reasons)}"
        assert not (wrong := pages.unlike(request, results)), wrong
        rows = request.memory.rows()
        assert rows is not None
        right = pages.contents[1]
        left = [at for at, byte in enumerate(bytes(rows.row(1))) if byte not in {0, FILL, right[at]}]
        assert not left, f"the missed page's memory holds wrong bytes, at {left}"
        kept(store, pages)
        got(store, pages)

    @law("STORE-1")
    @at_both_ends
    def test_a_page_that_was_swapped_with_another_is_a_miss(self, end: str) -> None:
        first, store = self.first_and(end)
        pages = self.batch(first, 2)
        kept(first, pages)
        raw = [self.read_raw(first, key) for key in pages.keys]
        for key, page in zip(pages.keys, reversed(raw), strict=True):
            self.write_raw(first, key, page)
        missed(store, pages, MissReason.IDENTITY)
        kept(store, pages)
        got(store, pages)

    @law("STORE-1")
    def test_no_layer_is_released_before_it_is_verified_for_all_pages(self) -> None:
        """A wrong byte in a late layer of one page: that layer, and those after it, are not released."""
        store = self.hold()
        pages = self.batch(store, 6, kv_format(24, num_heads=4, head_size=64))
        kept(store, pages)
        step = pages.form.layer_nbytes
        bad_layer = 9
        self._alter(store, pages, 4, lambda page: turned(page, bad_layer * step - pages.form.nbytes))
        request = pages.empty()
        job = store.submit_get(request)
        rows = request.memory.rows()
        assert rows is not None
        while True:
            ready = job.num_layers_ready
            if job.results() is not None:  # looked at last: then all layers are released
                break
            assert ready <= bad_layer, f"layer {bad_layer} is wrong, and {ready} layers were released"
            for index, content in enumerate(pages.contents):
                there = bytes(rows.row(index)[: ready * step])
                assert there == content[: ready * step], f"page {index} is not there in {ready} layers"
        results = ended(job)
        assert [reason is None for reason in results] == [True] * 4 + [False, True]
        assert results[4] is MissReason.CORRUPT
        assert not (wrong := pages.unlike(request, results)), wrong

    def _alter(self, store: Store, pages: Batch, index: int, alter: Callable[[bytes], bytes]) -> None:
        key = pages.keys[index]
        page = self.read_raw(store, key)
        assert page is not None, "a page that was kept cannot be read behind the store's back"
        self.write_raw(store, key, alter(page))


class Tenants(StoreSuite):
    """Pages of different deployments and tenants, on purpose and by accident."""

    @law("STORE-4")
    @at_both_ends
    def test_with_another_extra_or_namespace_nothing_is_found(self, end: str) -> None:
        first, store = self.first_and(end)
        namespace = self.batch(first, 1).keys[0]
        mine = self.batch(first, 3, namespace=namespace, extra=b"salt of one tenant")
        kept(first, mine)
        for extra in (b"", b"salt of another", b"salt of one tenan"):
            other = self.batch(first, 3, namespace=namespace, extra=extra)
            missed(store, other)
            assert not any(held(store, other))
        missed(store, self.batch(first, 3, namespace=namespace + b"2", extra=b"salt of one tenant"))
        got(store, mine)

    @law("STORE-4")
    def test_ends_with_different_secrets_or_checksums_find_nothing_of_each_other(self) -> None:
        place = self.place()
        namespace = b"of several secrets"
        self.open(place)
        if self.way(place) != "options":
            pytest.skip("ends that reach another process have shown the secret before")
        seals = [(None, True), (b"one", True), (b"two", True), (None, False)]
        ends = [
            self.open(attrs.evolve(place, secret=secret, checksums=checksums, first=None))
            for secret, checksums in seals
        ]
        batches = [self.batch(end, 3, namespace=namespace, seed=index) for index, end in enumerate(ends)]
        for end, pages in zip(ends, batches, strict=True):
            missed(end, pages)
            kept(end, pages)
        for end, pages in zip(ends, batches, strict=True):
            got(end, pages)

    @law("STORE-4")
    @pytest.mark.parametrize("checksums", [True, False])
    def test_pages_with_a_secret_come_back(self, checksums: bool) -> None:
        store = self.hold(secret=b"of the deployment", checksums=checksums)
        pages = self.batch(store, 4)
        kept(store, pages)
        got(store, pages)

    @law("STORE-4")
    @at_both_ends
    def test_a_page_that_was_made_without_the_secret_is_a_miss(self, end: str) -> None:
        place = self.place(secret=b"of the deployment")
        first = self.open(place)
        store = first if end == "first" else self.other(place)
        if store.seal.secret is None:
            pytest.skip(f"no stranger can write to {self.called}: its pages need no proof")
        pages = self.batch(first, 1)
        kept(first, pages)
        page = self.read_raw(first, pages.keys[0])
        assert page is not None
        length = store.seal.header_length(pages.form, pages.identities[0])
        other = pages.with_bits_of("a stranger")
        forged = other.page(0, attrs.evolve(place.seal, secret=b"a guess"))
        plain = other.page(0, PageSeal())
        for said, forgery, reasons in (
            ("another secret", forged, {MissReason.FORGED}),
            ("no proof", plain, {MissReason.FORMAT, MissReason.FORGED, MissReason.CORRUPT}),
            (
                "the proof of other bytes",
                forged[: length - 32] + page[length - 32 : length] + other.contents[0],
                {MissReason.FORGED},
            ),
            ("a proof of zeros", forged[: length - 32] + bytes(32) + other.contents[0], {MissReason.FORGED}),
        ):
            self.write_raw(first, pages.keys[0], forgery)
            (reason,) = ended(store.submit_get(pages.empty()))
            assert reason in reasons, f"a page with {said} gave {reason}"
        kept(store, pages)
        got(store, pages)

    @law("STORE-4")
    def test_a_page_that_is_replayed_under_another_key_is_a_miss(self) -> None:
        store = self.hold(secret=b"of the deployment")
        if store.seal.secret is None:
            pytest.skip(f"no stranger can write to {self.called}: its pages need no proof")
        pages = self.batch(store, 2)
        kept(store, pages)
        page = self.read_raw(store, pages.keys[0])
        self.write_raw(store, pages.keys[1], page)
        assert ended(store.submit_get(pages.empty())) == [None, MissReason.IDENTITY]
