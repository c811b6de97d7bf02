"""Stores "nixl", and pages for them."""

from __future__ import annotations

from typing import Any

from kvplug import Config, build_store
from kvplug.transport import (
    BlockingStore,
    MissReason,
    PageBuffers,
    PageRequest,
    PutReason,
    Series,
    Store,
    foreign_key,
    opaque_format,
)

PAGE = 40_000


def opened(**options: Any) -> Store:
    """A store with these options."""
    config = {"stores": ["nixl"], "timeout_s": 10, "options": {"nixl": options}}
    return build_store(Config.from_dict(config))


def blocking(store: Any) -> Any:
    """The plugin's own store, below kvplug's."""
    while not isinstance(store, BlockingStore):
        store = getattr(store, "store", None) or store._store
    return store


def request(store: Store, *names: str, nbytes: int = PAGE, fill: bytes = b"") -> PageRequest:
    """Pages under these names, whose content is the name or ``fill`` again and again."""
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


def put(store: Store, *names: str, **given: Any) -> list[PutReason | None]:
    return list(store.submit_put(request(store, *names, **given)).wait(30))


def got(store: Store, *names: str, **given: Any) -> list[MissReason | None]:
    """Pages that are got must be those that were put."""
    wanted, expected = request(store, *names, **{**given, "fill": b"?"}), request(store, *names, **given)
    reasons = list(store.submit_get(wanted).wait(30))
    for at, reason in enumerate(reasons):
        if reason is None:
            assert wanted.memory.rows().row(at) == expected.memory.rows().row(at)  # type: ignore[union-attr]
    return reasons


def held(store: Store, *names: str) -> list[str]:
    return [str(each) for each in store.submit_lookup(request(store, *names).keys).wait(30)]
