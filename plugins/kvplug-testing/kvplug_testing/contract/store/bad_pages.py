"""One page is bad: it cannot be read, or is gone behind the store's back. The others are as they were."""

from __future__ import annotations

from kvplug.transport import MissReason, Store
from kvplug_testing.contract.base import law
from kvplug_testing.contract.store.pages import Batch
from kvplug_testing.contract.store.suite import StoreSuite, at_both_ends, ended, got, held, kept, put

_BAD = 2


class BadPages(StoreSuite):
    """A page that nothing can be done about hides no other."""

    @law("STORE-7", "STORE-1")
    def test_a_page_that_cannot_be_read_is_missed_alone_and_is_not_promised_again(self) -> None:
        store = self.hold()
        pages, more = self.batch(store, 6), self.batch(store, 3)
        kept(store, pages)
        with self.unreadable(store, pages.keys[_BAD]):
            for _ in range(3):
                assert self._missed_alone(store, pages) is not MissReason.STORE_GONE
                self._is_not_promised(store, pages)
            kept(store, more)
            got(store, more)
        self._can_be_put(store, pages)

    @law("STORE-1")
    def test_a_put_that_says_kept_has_kept_the_page(self) -> None:
        """Also where something is under its key that cannot be read."""
        store = self.hold()
        pages = self.batch(store, 6)
        kept(store, pages)
        with self.unreadable(store, pages.keys[_BAD]):
            self._missed_alone(store, pages)
            results = put(store, pages)
            assert [each is None for each in results] == [at != _BAD for at in range(6)], (
                f"a put gave {results}, and one page cannot be read after it"
            )
            self._is_not_promised(store, pages)
        self._can_be_put(store, pages)

    @law("STORE-1")
    @at_both_ends
    def test_a_page_that_is_lost_behind_the_stores_back_is_not_promised_again(self, end: str) -> None:
        first, store = self.first_and(end)
        pages = self.batch(first, 6)
        kept(first, pages)
        assert all(held(store, pages))
        self.write_raw(first, pages.keys[_BAD], None)
        self._missed_alone(store, pages)
        self._is_not_promised(store, pages)
        kept(store, pages)
        assert all(held(store, pages))
        got(store, pages)

    def _missed_alone(self, store: Store, pages: Batch) -> MissReason:
        request = pages.empty()
        results = ended(store.submit_get(request))
        missed = [at for at, reason in enumerate(results) if reason is not None]
        assert missed == [_BAD], f"page {_BAD} is bad, and a get gave {results}"
        assert not (wrong := pages.unlike(request, results)), wrong
        return results[_BAD]  # type: ignore[no-any-return]

    def _is_not_promised(self, store: Store, pages: Batch) -> None:
        found = held(store, pages)
        assert found == [at != _BAD for at in range(6)], f"after a get has missed page {_BAD}, held: {found}"

    def _can_be_put(self, store: Store, pages: Batch) -> None:
        """What is there can be read again. A store that cannot remove pages may go on without it."""
        if put(store, pages)[_BAD] is None:
            assert all(held(store, pages))
            got(store, pages)
        else:
            assert not self.can(store, "remove"), "a page that could not be read is not replaced"
            self._is_not_promised(store, pages)
