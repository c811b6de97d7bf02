"""Calls of stores, which must end in time and with right results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvplug.transport import Job, MissReason, Presence, PutReason, Store
from kvplug_testing import waits
from kvplug_testing.contract.store.pages import Batch


def ended(job: Job[Any]) -> Any:
    """The results of a job, which must end in time."""
    return job.wait(waits.patience_s)


def put(store: Store, pages: Batch) -> list[PutReason | None]:
    """The results of a put."""
    return ended(store.submit_put(pages.filled()))  # type: ignore[no-any-return]


def kept(store: Store, pages: Batch) -> None:
    """Put pages, which must be kept."""
    results = put(store, pages)
    assert results == [None] * len(pages), f"pages were not kept: {results}"


def got_or_missed(store: Store, pages: Batch) -> list[MissReason | None]:
    """Get pages, which must have their bytes if they are there. Returns the results."""
    request = pages.empty()
    results: list[MissReason | None] = ended(store.submit_get(request))
    assert not (wrong := pages.unlike(request, results)), wrong
    return results


def got(store: Store, pages: Batch) -> None:
    """Get pages, which must be there with their bytes."""
    results = got_or_missed(store, pages)
    assert results == [None] * len(pages), f"pages that are there were missed: {results}"


def missed(store: Store, pages: Batch, *reasons: MissReason) -> None:
    """Get pages, which must be missed for one of the reasons (default: the store does not have them)."""
    results, allowed = ended(store.submit_get(pages.empty())), reasons or (MissReason.ABSENT,)
    assert {*results} <= {*allowed}, f"{results} came, and each must be one of {', '.join(allowed)}"


def is_missed(store: Store, pages: Batch, more: Batch) -> None:
    """Requests to a store that is gone are misses; ``more`` are other pages to put."""
    missed(store, pages, MissReason.STORE_GONE, MissReason.TIMEOUT)
    assert {*looked_up(store, pages.keys)} <= {Presence.ABSENT, Presence.HELD}
    results = ended(store.submit_put(more.filled(), timeout=waits.patience_s))
    assert set(results) <= {PutReason.STORE_GONE, PutReason.TIMEOUT}, f"a put gave {results}"
    assert ended(store.submit_remove(pages.keys)) == [False] * len(pages)


def looked_up(store: Store, keys: Sequence[bytes], **given: Any) -> list[Presence]:
    """The presence of each key, by a lookup."""
    return ended(store.submit_lookup(keys, **given))  # type: ignore[no-any-return]


def held(store: Store, pages: Batch) -> list[bool]:
    """Whether a lookup finds each page held."""
    return [presence is Presence.HELD for presence in looked_up(store, pages.keys)]


def remove(store: Store, keys: Sequence[bytes]) -> None:
    """Remove pages, which must succeed."""
    results = ended(store.submit_remove(keys))
    assert results == [True] * len(keys), f"pages were not removed: {results}"
