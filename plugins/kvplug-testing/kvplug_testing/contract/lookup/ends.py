"""A store and an end that reaches it, for the general laws."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, ClassVar, Final

from kvplug import TimeoutError
from kvplug.transport import Entry, LookupBuffer, LookupStore, Pipe, PipeEndpoint, PipeListener
from kvplug_testing import peers, waits
from kvplug_testing.comparison import UnlikeError
from kvplug_testing.contract.base import law
from kvplug_testing.contract.ends import Calls, End, Ends, fields_of, given
from kvplug_testing.contract.general import PART_BYTES, General
from kvplug_testing.contract.lookup.entries import Put, Sink, answered, random_tensor, unlike
from kvplug_testing.contract.lookup.suite import LookupSuite, insert, pipe_endpoint
from kvplug_testing.waits import Call

_ROOM: Final = 3
"""How many entries of exchanges fit into the store."""
_ABSENT: Final = [1 << 40]
_read: Final[list[Entry]] = []
"""What a program that leaves has read."""


def _numbered(number: int) -> Put:
    """An entry that is the same in every process."""
    key = random_tensor("float32", (2, 2, 2, 4), seed=number)
    hidden = random_tensor("uint8", (PART_BYTES,), seed=number + 1)
    metadata = {"number": number}
    return Put(tokens=[number, number + 1], key=key, value=key, hidden=hidden, metadata=metadata)


class LookupEnd(End):
    """The end that holds the entries, or the one that reaches it."""

    def __init__(self, role: str, buffer: LookupBuffer, evicts: bool) -> None:
        self.role = role
        self._buffer = buffer
        self._waits_for_room = isinstance(buffer, LookupStore) and not evicts
        self._held: list[int] = []
        if isinstance(buffer, LookupStore):
            self.gone = None

    def calls(self) -> Calls:
        buffer = self._buffer
        return {
            "insert": partial(self._insert, _numbered(0)),
            "match": lambda timeout: buffer.match([1]),
            "drop_select": lambda timeout: buffer.drop_select([1], timeout=timeout),
            "drop_select of any": lambda timeout: buffer.drop_select(None, timeout=timeout),
            "select": lambda timeout: buffer.select([1], timeout=timeout),
        }

    def blocking(self) -> Calls:
        buffer = self._buffer
        found: dict[str, Any] = {
            "drop_select": lambda *timeout: buffer.drop_select(_ABSENT, **given(timeout)),
            "drop_select of any": lambda *timeout: buffer.drop_select(None, extra=b"e", **given(timeout)),
        }
        if self._waits_for_room:
            found["insert"] = partial(self._insert, _numbered(len(self._held)))
        return found

    def unclogged(self) -> Sequence[str]:
        return ["drop_select", "drop_select of any"]

    def timed(self) -> Calls:
        without = ("match",) if isinstance(self._buffer, LookupStore) else ("match", "insert")
        return {name: call for name, call in super().timed().items() if name not in without}

    def part(self, number: int, timeout: float | None) -> None:
        put = _numbered(100 + number)
        if isinstance(self._buffer, LookupStore):
            self._insert(put, timeout)
        else:
            self._take(put, timeout)

    def clog(self) -> int:
        if self._waits_for_room:
            try:
                for number in range(2 * _ROOM):
                    self._insert(_numbered(number), 0.0)
                    self._held.append(number)
            except TimeoutError:
                pass
        return len(self._held)

    def drain(self, count: int) -> None:
        for number in range(count):
            self._take(_numbered(number), waits.patience_s)

    def busy(self, leaves: bool) -> None:
        """One entry is read again and again. What was read is kept."""
        put = _numbered(100)
        if isinstance(self._buffer, LookupStore):
            self._insert(put, None)
            self._buffer.drop_select(_ABSENT, timeout=None)
        while not self._buffer.match(put.tokens):
            time.sleep(0.01)
        while True:
            _read.append(self._buffer.select(put.tokens, timeout=None))

    def lied_to(self) -> Calls:
        buffer, put, sink = self._buffer, _numbered(0), Sink()
        asked = put.tokens
        inserted = 2 if isinstance(buffer, LookupStore) else 0

        def match(timeout: float | None) -> None:
            count = buffer.match(asked)
            assert type(count) is int and 0 <= count <= len(asked), f"{count} of {len(asked)} tokens match"

        def read(timeout: float | None) -> None:
            answered(asked, buffer.select(asked, min_tokens=1, timeout=timeout), min_tokens=1)

        def read_layers(timeout: float | None) -> None:
            entry = buffer.select(asked, min_tokens=1, sink=sink, timeout=timeout)
            answered(asked, entry, min_tokens=1, sink=sink)

        return {
            **{f"insert {number}": partial(self._insert, put) for number in range(inserted)},
            "drop_select": lambda timeout: answered(asked, buffer.drop_select(asked, timeout=timeout)),
            "match": match,
            "select": read,
            "select into a sink": read_layers,
            "drop_select of any": lambda timeout: answered(None, buffer.drop_select(None, timeout=timeout)),
        }

    def _take(self, put: Put, timeout: float | None) -> None:
        entry = answered(put.tokens, self._buffer.drop_select(put.tokens, timeout=timeout))
        if wrong := unlike(put, entry):
            raise UnlikeError(wrong)

    def _insert(self, put: Put, *timeout: float | None) -> int:
        return insert(self._buffer, put, **given(timeout))

    def close(self, timeout: float | None) -> None:
        self._buffer.close(timeout)

    def abort(self) -> None:
        self._buffer.abort()

    def closed(self) -> bool:
        return self._buffer.is_lost

    def is_still_open(self) -> None:
        waits.until(lambda: self._buffer.is_lost, what="that an end knows that its store is gone")


class LookupEnds(Ends):
    """A store and one end that reaches it."""

    roles: ClassVar[Sequence[str]] = ("holding", "reaching")
    suite: LookupSuite

    def make(self, children: Sequence[peers.Peer | None], context: Mapping[str, Any]) -> list[End | None]:
        pipes = self._pipes(context, is_local=not any(children))
        if children[0] is not None:
            contact = children[0].recv()
            if children[1] is not None:
                children[1].send(contact)
                return [None, None]
            return [None, self._reach(pipes, contact, context)]
        with closing(pipes.listen()) as listener:
            if children[1] is not None:
                children[1].send(listener.contact)
                return [self._hold(listener, context), None]
            reaching = Call(lambda: self._reach(pipes, listener.contact, context))
            return [self._hold(listener, context), reaching.result()]

    def join(self, parent: peers.Parent, role: int, context: Mapping[str, Any]) -> End:
        pipes = self._pipes(context, is_local=False)
        if role:
            return self._reach(pipes, parent.recv(None), context)
        with closing(pipes.listen()) as listener:
            parent.send(listener.contact)
            return self._hold(listener, context)

    def _pipes(self, context: Mapping[str, Any], *, is_local: bool) -> PipeEndpoint:
        name = self.suite.pipes if is_local else self.suite.remote_pipes
        fields = {key: value for key, value in fields_of(context).items() if key != "timeout_s"}
        return pipe_endpoint(name, self.suite.timeout_s, {}, **fields)

    def _hold(self, listener: PipeListener, context: Mapping[str, Any]) -> End:
        signal, data = (self._ended(listener.accept(timeout=waits.patience_s)) for _ in range(2))
        store = self.suite.hold(_ROOM * PART_BYTES + PART_BYTES // 2, timeout_s=context.get("timeout_s"))
        store.attach(signal, data)
        return LookupEnd("holding", store, self.suite.evicts)

    def _reach(self, pipes: PipeEndpoint, contact: str, context: Mapping[str, Any]) -> End:
        signal, data = (self._ended(pipes.connect(contact, timeout=waits.patience_s)) for _ in range(2))
        end = self.suite.endpoint(timeout_s=context.get("timeout_s")).reach(signal, data)
        self.suite.later(end.abort)
        return LookupEnd("reaching", end, self.suite.evicts)

    def _ended(self, pipe: Pipe) -> Pipe:
        self.suite.later(pipe.abort)
        return pipe


class LookupGeneral(LookupSuite, General):
    """The general laws for lookup buffers."""

    lies = 60

    @property
    def lied_to_processes(self) -> str:
        return self.missing_pipes or super().lied_to_processes

    def ends(self) -> LookupEnds:
        return LookupEnds(self)

    @law("LOOKUP-7", "LOOKUP-4", needs="another_host")
    def test_entries_are_taken_whole_from_another_host(self) -> None:
        ends = self.between_hosts()
        for number in range(1, 4):
            self.exchange(ends, number)
