"""A resource runs out while a lookup buffer is made, used or closed (law ALL-9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from kvplug.transport import Entry, NamedExhaustion
from kvplug_testing.contract import exhaustion
from kvplug_testing.contract.exhaustion import Attempt, let_go, together
from kvplug_testing.contract.lookup.entries import entry, unlike
from kvplug_testing.contract.lookup.suite import LookupSuite, insert, pipe_endpoint
from kvplug_testing.pairs import PipePairs

_HIDDEN: Final = 800_000
"""Elements of an entry's hidden states: more than a little memory."""


class LookupAttempt(Attempt):
    """A store, and an end that reaches it, in this process."""

    def __init__(self, suite: LookupSuite) -> None:
        self._suite = suite
        self._put = entry([1, 2, 3], hidden=_HIDDEN)
        self._pairs = PipePairs()
        self._endpoint: Any = None
        self._store: Any = None
        self._reach: Any = None
        self._got: list[Entry] = []

    @property
    def steps(self) -> Sequence[Callable[[], None]]:
        return (
            self._make_endpoint,
            self._hold,
            self._reach_it,
            self._insert,
            self._select_there,
            self._select_here,
            self._take,
            self._close,
        )

    def may_break(self, step: int) -> bool:
        return self.steps[step] in (self._select_here, self._take)

    def _make_endpoint(self) -> None:
        with NamedExhaustion("building a lookup buffer"):  # as kvplug's own builder does
            self._endpoint = self._suite.endpoint()

    def _hold(self) -> None:
        self._store = self._endpoint.hold()

    def _reach_it(self) -> None:
        """Over pipes that are not judged here."""
        self._pairs.close()
        pipes = pipe_endpoint(self._suite.pipes, self.timeout_s, {})
        (our_signal, their_signal), (our_data, their_data) = (self._pairs.local(pipes) for _ in range(2))
        self._store.attach(their_signal, their_data)
        self._reach = self._endpoint.reach(our_signal, our_data)

    def _insert(self) -> None:
        together(partial(insert, self._store, self._put, self.timeout_s), within=4 * self.timeout_s)

    def _select_there(self) -> None:
        self._get(self._store.select)

    def _select_here(self) -> None:
        self._get(self._reach.select)

    def _take(self) -> None:
        self._get(self._reach.drop_select)

    def _get(self, verb: Callable[..., Entry]) -> None:
        def get() -> None:
            self._got.append(verb(self._put.tokens, timeout=self.timeout_s))

        together(get, within=4 * self.timeout_s)

    def _close(self) -> None:
        for end in (self._reach, self._store):
            together(partial(end.close, self.timeout_s), within=4 * self.timeout_s)

    def check(self) -> None:
        assert [unlike(self._put, got) for got in self._got] == [""] * 3

    def end(self) -> None:
        let_go(*(thing.abort for thing in (self._reach, self._store) if thing is not None), self._pairs.close)


class Exhaustion(LookupSuite, exhaustion.Exhaustion):
    """Descriptors, threads, memory and space run out."""

    def attempt(self) -> Attempt:
        return LookupAttempt(self)
