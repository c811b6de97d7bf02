"""A resource runs out while a store is opened, reached, used or closed (law ALL-9).

Jobs of stores do not raise: a page that could not be kept or had is a result with its reason. So here no
result has to name what ran out; but none may be wrong, and all must succeed as soon as there is enough.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final

import pytest

from kvplug import KvplugError
from kvplug.transport import Job, MissReason, NamedExhaustion, PageRequest, PutReason, Store
from kvplug_testing import waits
from kvplug_testing.contract import exhaustion
from kvplug_testing.contract.exhaustion import Attempt, EndedError, ResultError, let_go, together
from kvplug_testing.contract.store.pages import KIB, MIB, Batch, batch, sized_format
from kvplug_testing.contract.store.suite import Place, StoreSuite

_PAGE_BYTES: Final = 256 * KIB
_PAGES: Final = 6
"""Together more than a little memory."""
_AGAIN_S: Final = 0.05
_PASSING: Final = {PutReason.STORE_GONE, MissReason.STORE_GONE, MissReason.ABSENT}
"""A store that has failed is tried again after a while (law STORE-7), and an earlier put, which had no room,
may evict pages late."""


@contextmanager
def _opening() -> Iterator[None]:
    """What kvplug does where it opens a store: what it recognises is named, and all else is quoted."""
    try:
        with NamedExhaustion("opening a store"):
            yield
    except (KvplugError, AssertionError):  # the suite's own
        raise
    except Exception as e:
        raise ResultError(f"{type(e).__name__}: {e}") from e


class StoreAttempt(Attempt):
    """The first end of a place, and another one, in this process."""

    unlimited = 1

    def __init__(self, suite: StoreSuite) -> None:
        self._suite = suite
        self._scope: AbstractContextManager[None] | None = None
        self._place: Place
        self._pages: Batch
        self._filled: PageRequest
        self._empty: PageRequest
        self._store: Store | None = None
        self._other: Store | None = None

    @property
    def steps(self) -> Sequence[Callable[[], None]]:
        return (self._prepare, self._open, self._reach, self._put, self._get, self._get_there, self._close)

    def may_break(self, step: int) -> bool:
        return self.steps[step] != self._open  # then it says that it is lost

    def _prepare(self) -> None:
        self._scope = self._suite.scope()
        self._scope.__enter__()
        self._place = self._suite.place(max(16 * MIB, self._suite.budget_bytes))
        self._pages = batch(_PAGES, sized_format(_PAGE_BYTES), seal=self._place.seal)
        self._filled = self._pages.filled()
        self._empty = self._pages.empty()

    def _open(self) -> None:
        with _opening():
            self._store = self._suite.open(self._place)

    def _reach(self) -> None:
        try:
            with _opening():
                self._other = self._suite.other(self._place)
        except pytest.skip.Exception:  # this store has one end
            self._other = self._store

    def _put(self) -> None:
        assert self._store is not None
        self._until_done("kept", self._store, self._submit_put)

    def _submit_put(self) -> Job[Any]:
        assert self._store is not None
        return self._store.submit_put(self._filled, timeout=self.timeout_s)

    def _get(self) -> None:
        self._get_at(self._store)

    def _get_there(self) -> None:
        self._get_at(self._other)

    def _get_at(self, store: Store | None) -> None:
        assert store is not None
        request = self._empty
        results = self._until_done("had", store, lambda: store.submit_get(request, timeout=self.timeout_s))
        assert not (wrong := self._pages.unlike(request, results)), wrong

    def _until_done(self, what: str, store: Store, submit: Callable[[], Job[Any]]) -> Sequence[Any]:
        """The results, which all say that it is done.

        Raises:
            ResultError: not all of them do.
            EndedError: the same, and the store is lost.
        """
        limit = time.monotonic() + self.timeout_s
        while True:
            results = submit().wait(self.timeout_s + waits.patience_s)
            missed = {reason for reason in results if reason is not None}
            if not missed:
                return results
            if store.is_lost or not missed <= _PASSING or time.monotonic() > limit:
                raised = EndedError if store.is_lost else ResultError
                raise raised(f"pages were not {what}: {', '.join(sorted(missed))}")
            time.sleep(_AGAIN_S)
            if MissReason.ABSENT in missed:
                self._submit_put().wait(self.timeout_s + waits.patience_s)

    def _close(self) -> None:
        assert self._store is not None and self._other is not None
        for store in (self._other, self._store):
            together(partial(store.close, self.timeout_s), within=4 * self.timeout_s)

    def end(self) -> None:
        let_go(*(store.abort for store in (self._other, self._store) if store is not None))
        if self._scope is not None:
            let_go(partial(self._scope.__exit__, None, None, None))


class Exhaustion(StoreSuite, exhaustion.Exhaustion):
    """Descriptors, threads, memory and space run out."""

    def attempt(self) -> Attempt:
        return StoreAttempt(self)
