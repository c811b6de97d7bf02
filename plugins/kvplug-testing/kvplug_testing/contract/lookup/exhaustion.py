"""A resource runs out while a lookup buffer is made, used or closed (law ALL-9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from kvplug.transport import Entry, LookupBuffer, LookupEndpoint, LookupStore, NamedExhaustion, Pipe
from kvplug_testing.contract import exhaustion
from kvplug_testing.contract.exhaustion import Attempt, let_go, together
from kvplug_testing.contract.lookup.entries import entry, unlike
from kvplug_testing.contract.lookup.suite import LookupSuite, pipe_endpoint

_HIDDEN: Final = 800_000
"""Elements of an entry's hidden states: more than a little memory."""


class LookupAttempt(Attempt):
    """A store, and an end that reaches it, in this process."""

    def __init__(self, suite: LookupSuite) -> None:
        self._suite = suite
        self._put = entry([1, 2, 3], hidden=_HIDDEN)
        self._endpoint: LookupEndpoint | None = None
        self._store: LookupStore | None = None
        self._reach: LookupBuffer | None = None
        self._pipes: list[Pipe] = []
        self._is_inserted = False
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
        assert self._endpoint is not None
        self._store = self._endpoint.hold()

    def _reach_it(self) -> None:
        assert self._endpoint is not None and self._store is not None
        let_go(*(pipe.abort for pipe in self._pipes))
        ours_to_signal, theirs_to_signal = self._pipe_pair()
        our_data, their_data = self._pipe_pair()
        self._store.attach(theirs_to_signal, their_data)
        self._reach = self._endpoint.reach(ours_to_signal, our_data)

    def _pipe_pair(self) -> tuple[Pipe, Pipe]:
        """Of a transport that is not judged here. It connects without waiting."""
        end = pipe_endpoint(self._suite.pipes, self._suite.timeout_s, {})
        listener = end.listen()
        try:
            connected = end.connect(listener.contact)
            self._pipes.append(connected)
            accepted = listener.accept(timeout=self.timeout_s)
            self._pipes.append(accepted)
        finally:
            listener.close()
        return connected, accepted

    def _insert(self) -> None:
        assert self._store is not None
        put = self._put
        insert = partial(
            self._store.insert, put.tokens, put.roi, put.key, put.value, put.hidden, extra=put.extra
        )
        together(partial(insert, metadata=put.metadata, timeout=self.timeout_s), within=4 * self.timeout_s)

    def _select_there(self) -> None:
        assert self._store is not None
        self._get(self._store.select)

    def _select_here(self) -> None:
        assert self._reach is not None
        self._get(self._reach.select)

    def _take(self) -> None:
        assert self._reach is not None
        self._get(self._reach.drop_select)

    def _get(self, verb: Callable[..., Entry]) -> None:
        def get() -> None:
            self._got.append(verb(self._put.tokens, timeout=self.timeout_s))

        together(get, within=4 * self.timeout_s)

    def _close(self) -> None:
        assert self._reach is not None and self._store is not None
        together(partial(self._reach.close, self.timeout_s), within=4 * self.timeout_s)
        together(partial(self._store.close, self.timeout_s), within=4 * self.timeout_s)

    def check(self) -> None:
        assert len(self._got) == 3, f"{len(self._got)} entries were received, not 3"
        for got in self._got:
            wrong = unlike(self._put, got)
            assert not wrong, wrong

    def end(self) -> None:
        for thing in (self._reach, self._store):
            if thing is not None:
                let_go(thing.abort)
        let_go(*(pipe.abort for pipe in self._pipes))


class Exhaustion(LookupSuite, exhaustion.Exhaustion):
    """Descriptors, threads, memory and space run out."""

    def attempt(self) -> Attempt:
        return LookupAttempt(self)
