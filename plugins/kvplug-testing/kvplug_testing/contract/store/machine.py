"""Random calls of a store, each compared with a dict. Hypothesis generates them."""

# A type checker may run without hypothesis; then its decorators have no type.
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import uuid
from functools import partial

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvplug import UnsupportedError
from kvplug.transport import MissReason, PageBuffers, Presence, Store
from kvplug_testing import waits
from kvplug_testing.contract.store.calls import ended
from kvplug_testing.contract.store.index import Index
from kvplug_testing.contract.store.pages import Batch, kv_format, outside, sized_format, strided
from kvplug_testing.contract.store.suite import StoreSuite
from kvplug_testing.waits import until

_PAGES = 6
# Few keys, so that most calls meet pages that are there, or were.
_some = st.lists(st.integers(0, _PAGES - 1), max_size=4)
_series = st.integers(0, 2)
_bits = st.sampled_from(["one writer", "another"])
_other = st.booleans()
_gap = st.sampled_from([0, 24, 4096])


class StoreMachine(RuleBasedStateMachine):  # type: ignore[misc, unused-ignore]
    """Two ends of a place, and a dict as the model of its pages."""

    def __init__(self, suite: StoreSuite, store: Store, other: Store) -> None:
        super().__init__()
        self.suite, self.store, self.other = suite, store, other
        namespace = uuid.uuid4().bytes
        self.batches = [
            self.suite.batch(self.store, _PAGES, form, namespace=namespace, shard=shard)
            for form, shard in ((kv_format(), b""), (kv_format(), b"1"), (sized_format(3000), b""))
        ]
        self.known = {key for pages in self.batches for key in pages.keys}
        self.held: dict[bytes, bytes] = {}
        self.coming: set[bytes] = set()
        self.can_list = True
        self.can_declare = self.suite.can(self.store, "declare")
        # what another end has put may be counted later
        self.can_count = self.other is self.store and self.suite.can(self.store, "usage")
        self.before = self.store.usage()
        self.index = Index() if self.store.has_events else None
        if self.index is not None:
            self.store.subscribe(self.index)

    def _end(self, other: bool) -> Store:
        return self.other if other else self.store

    @rule(series=_series, some=_some, bits=_bits, other=_other, gap=_gap)
    def put(self, series: int, some: list[int], bits: str, other: bool, gap: int) -> None:
        pages = self.batches[series][some].with_bits_of(bits)
        memory = self._rows(pages, other, gap)
        self._put(pages, other, memory)
        pages.with_bits_of("a later request").filled(memory)
        self.get(series, some, other, gap)

    @rule(series=_series, some=_some, bits=_bits, other=_other, skipped=st.integers(0, 2))
    def put_from_the_stores_memory(
        self, series: int, some: list[int], bits: str, other: bool, skipped: int
    ) -> None:
        pages, store = self.batches[series][some].with_bits_of(bits), self._end(other)
        whole = store.allocate(pages.series, len(pages) + skipped)
        assert whole is not None, "there is no room in a store that is nearly empty"
        self._put(pages, other, PageBuffers(pages.form, whole.rows()[skipped:]) if skipped else whole)
        for _ in range(2):
            store.free(whole)
        self.get(series, some, other, 0)

    def _put(self, pages: Batch, other: bool, memory: PageBuffers) -> None:
        job = self._end(other).submit_put(pages.filled(memory))
        assert ended(job) == [None] * len(pages), f"pages were not kept: {job.results()}"
        assert job.wait_settled(waits.patience_s)
        for key, content in zip(pages.keys, pages.contents, strict=True):
            self.held.setdefault(key, content)
        self.coming.difference_update(pages.keys)

    @rule(series=_series, some=_some, other=_other, gap=_gap)
    def get(self, series: int, some: list[int], other: bool, gap: int) -> None:
        pages = self.batches[series][some]
        memory = self._rows(pages, other, gap)
        around = outside(memory)
        results = ended(self._end(other).submit_get(pages.request(memory)))
        for index, key in enumerate(pages.keys):
            if key not in self.held:
                assert results[index] is MissReason.ABSENT, f"an absent page gave {results[index]}"
                continue
            assert results[index] is None, f"a page that is held was missed: {results[index]}"
            assert bytes(memory.rows().row(index)) == self.held[key], "the bytes of another put came"
        assert outside(memory) == around, "bytes between the rows were written"

    def _rows(self, pages: Batch, other: bool, gap: int) -> PageBuffers:
        """Registered memory whose rows lie backwards, with so many bytes before each."""
        memory = strided(pages.form, len(pages), gap)
        self._end(other).register_memory(memory)
        return memory

    @rule(series=_series, other=_other)
    def look_up(self, series: int, other: bool) -> None:
        pages = self.batches[series]
        found = ended(self._end(other).submit_lookup(pages.keys))
        for key, presence in zip(pages.keys, found, strict=True):
            if key in self.held:
                assert presence is Presence.HELD
            elif key not in self.coming:
                assert presence is Presence.ABSENT
            elif not other:
                assert presence is Presence.COMING
        if other and self.suite.can(self.other, "declare"):
            coming = [key for key in pages.keys if key in self.coming]
            until(partial(self._are_coming, coming), within=5, what="COMING at the other end")

    def _are_coming(self, keys: list[bytes]) -> bool:
        return {*ended(self.other.submit_lookup(keys))} <= {Presence.COMING}

    @rule(series=_series, some=_some, other=_other)
    def remove(self, series: int, some: list[int], other: bool) -> None:
        pages = self.batches[series][sorted(set(some))]
        used = self.store.usage().used_bytes
        results = ended(self._end(other).submit_remove(pages.keys))
        if results == [True] * len(pages):
            gone = [self.held.pop(key) for key in pages.keys if key in self.held]
            self.coming.difference_update(pages.keys)
            if gone and self.can_count:
                assert self.store.usage().used_bytes < used, "removed pages are still counted"
        else:
            assert not any(results), f"some pages were removed: {results}"

    @rule(other=_other)
    def remove_all(self, other: bool) -> None:
        try:
            results = ended(self._end(other).submit_remove(None))
        except UnsupportedError:
            return
        if results == [True]:
            self.held.clear()
            self.coming.clear()
            self.before = attrs.evolve(self.before, num_pages=0, used_bytes=0)
        else:
            assert other, "a removal of all pages failed"

    @precondition(lambda self: self.can_declare)
    @rule(series=_series, some=_some)
    def declare(self, series: int, some: list[int]) -> None:
        pages = self.batches[series][some]
        self.store.declare(pages.series, pages.keys, timeout=600)
        self.coming.update(set(pages.keys) - set(self.held))

    @precondition(lambda self: self.can_declare)
    @rule(series=_series, some=_some)
    def withdraw(self, series: int, some: list[int]) -> None:
        keys = self.batches[series][some].keys
        self.store.withdraw(keys)
        self.coming.difference_update(keys)

    @rule(series=_series, some=_some, other=_other)
    def use(self, series: int, some: list[int], other: bool) -> None:
        keys, store = self.batches[series][some].keys, self._end(other)
        store.touch(keys)
        ended(store.submit_lookup(keys, lease_s=5.0))
        store.release(keys)

    @invariant()
    def keys_events_and_usage_are_those_of_the_model(self) -> None:
        if self.can_count:
            usage = self.store.usage()
            assert usage.num_pages - self.before.num_pages == len(self.held)
            least = sum(map(self._kept_bytes, self.held))
            assert usage.used_bytes - self.before.used_bytes >= least, "not all bytes are counted"
        for pages in self.batches:
            held = {key for key in pages.keys if key in self.held}
            if self.can_list:
                try:
                    assert {*self.store.keys(pages.series)} & self.known == held
                except UnsupportedError:
                    self.can_list = False
            if self.index is not None:
                coming = {key for key in pages.keys if key in self.coming}
                known = partial(self.index.has_only, pages.series, held, coming)
                until(known, within=5, what="the events of a change")
                self.index.check()

    def _kept_bytes(self, key: bytes) -> int:
        """The bytes of a page and of its header."""
        pages = next(pages for pages in self.batches if key in pages.keys)
        identity = pages.identities[pages.keys.index(key)]
        return self.store.seal.header_length(pages.form, identity) + pages.form.nbytes

    def teardown(self) -> None:
        if self.other is not self.store:
            self.other.abort()
        self.store.abort()
