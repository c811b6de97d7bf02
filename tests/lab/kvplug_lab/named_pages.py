"""Pages of opaque bytes for tests of a store: named by texts, and filled so that a wrong one is noticed.

PAGES = NamedPages(40_000)

def test_a_page_comes_back(store):
    assert PAGES.put(store, "a") == [None]
    assert PAGES.got(store, "a") == [None]
"""

from __future__ import annotations

from typing import Any

from kvplug.transport import BlockingStore, MissReason, PageBuffers, PageRequest, PutReason, Series, Store
from kvplug.transport.store.format import opaque_format
from kvplug.transport.store.keys import foreign_key

_PATIENCE_S = 30.0


class NamedPages:
    """Pages of ``nbytes`` bytes, unless a call gives another size."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def request(self, store: Store, *names: str, nbytes: int = 0, fill: bytes = b"") -> PageRequest:
        """Pages under these names, whose content is ``fill`` again and again, by default the name."""
        nbytes = nbytes or self.nbytes
        form = opaque_format(nbytes)
        identities = [name.encode() for name in names]
        memory = PageBuffers.empty(form, len(names))
        for at, identity in enumerate(identities):
            content = fill or identity
            memory.rows().row(at)[:] = (content * (nbytes // len(content) + 1))[:nbytes]
        return PageRequest(
            series=Series(form, b"", store.seal.id),
            keys=[foreign_key(b"test", identity) for identity in identities],
            identities=identities,
            memory=memory,
        )

    def put(self, store: Store, *names: str, **given: Any) -> list[PutReason | None]:
        """Put them. ``given``: as :meth:`request`."""
        return list(store.submit_put(self.request(store, *names, **given)).wait(_PATIENCE_S))

    def got(
        self, store: Store, *names: str, timeout: float | None = None, **given: Any
    ) -> list[MissReason | None]:
        """Get them, and check that those which came are those that were put with the same arguments."""
        wanted = self.request(store, *names, **{**given, "fill": b"?"})
        expected = self.request(store, *names, **given)
        patience = {} if timeout is None else {"timeout": timeout}
        reasons = list(store.submit_get(wanted, **patience).wait(_PATIENCE_S))
        for at, reason in enumerate(reasons):
            if reason is None:
                assert wanted.memory.rows().row(at) == expected.memory.rows().row(at)  # type: ignore[union-attr]
        return reasons


def own_store(store: Any) -> BlockingStore:
    """The plugin's own store, below those of kvplug around it."""
    while not isinstance(store, BlockingStore):
        store = getattr(store, "store", None) or store._store
    return store
