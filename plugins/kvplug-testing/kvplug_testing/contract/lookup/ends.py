"""A store and an end that reaches it, for the general laws."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Final

from kvplug import TimeoutError
from kvplug.transport import Entry, LookupBuffer, LookupEndpoint, NamedExhaustion, PipeListener
from kvplug_testing import waits
from kvplug_testing.comparison import UnlikeError
from kvplug_testing.contract.base import law
from kvplug_testing.contract.ends import Calls, End, Ends, fields_of
from kvplug_testing.contract.general import PART_BYTES, General
from kvplug_testing.contract.lookup.entries import Put, Sink, answered, unlike
from kvplug_testing.contract.lookup.suite import LookupSuite, insert, pipe_endpoint
from kvplug_testing.contract.pipe.content import tensor_of

_ROOM: Final = 3
"""How many entries of exchanges fit into the store."""
_ABSENT: Final = [1 << 40]
_read: Final[list[Entry]] = []
"""What a program that leaves has read."""


def _numbered(number: int) -> Put:
    """An entry that is the same in every process."""
    key = tensor_of("float32", (2, 2, 2, 4), seed=number)
    hidden = tensor_of("uint8", (PART_BYTES,), seed=number + 1)
    metadata = {"number": number}
    return Put(tokens=[number, number + 1], key=key, value=key, hidden=hidden, metadata=metadata)


class LookupEnd(End):
    """The end that holds the entries, or the one that reaches it."""

    def __init__(self, role: str, buffer: LookupBuffer, evicts: bool) -> None:
        self.role = role
        self.thing = buffer
        self._waits_for_room = isinstance(buffer, LookupEndpoint.Store) and not evicts
        self._num_held = 0
        if isinstance(buffer, LookupEndpoint.Store):
            self.gone = None

    def calls(self) -> Calls:
        buffer = self.thing
        return {
            "insert": partial(insert, buffer, _numbered(0)),
            "drop_select": partial(buffer.drop_select, [1]),
            "drop_select of any": partial(buffer.drop_select, None),
            "select": partial(buffer.select, [1]),
        }

    def untimed(self) -> dict[str, Any]:
        return {"match": partial(self.thing.match, [1])}

    def blocking(self) -> Calls:
        buffer = self.thing
        found: dict[str, Any] = {
            "drop_select": partial(buffer.drop_select, _ABSENT),
            "drop_select of any": partial(buffer.drop_select, None, extra=b"e"),
        }
        if self._waits_for_room:
            found["insert"] = partial(insert, buffer, _numbered(self._num_held))
        return found

    def unclogged(self) -> Sequence[str]:
        return ["drop_select", "drop_select of any"]

    def timed(self) -> Calls:
        refused = () if isinstance(self.thing, LookupEndpoint.Store) else ("insert",)
        return {name: call for name, call in super().timed().items() if name not in refused}

    def exchange(self, content: Put, timeout: float | None) -> list[Entry]:
        if isinstance(self.thing, LookupEndpoint.Store):
            self.once("insert", lambda: insert(self.thing, content, timeout))
            return []
        return [self.once("take", lambda: self.thing.drop_select(content.tokens, timeout=timeout))]

    def check(self, content: Put, received: Sequence[Entry]) -> None:
        for got in received:
            if wrong := unlike(content, answered(content.tokens, got)):
                raise UnlikeError(wrong)

    def clog(self) -> int:
        with contextlib.suppress(TimeoutError):
            while self._waits_for_room and self._num_held < 2 * _ROOM:
                insert(self.thing, _numbered(self._num_held), 0.0)
                self._num_held += 1
        return self._num_held

    def drain(self, count: int) -> None:
        for number in range(count):
            content = _numbered(number)
            self.check(content, [self.thing.drop_select(content.tokens, timeout=waits.patience_s)])

    def busy(self, leaves: bool) -> None:
        """One entry is read again and again. What was read is kept."""
        put = _numbered(100)
        if isinstance(self.thing, LookupEndpoint.Store):
            insert(self.thing, put, None)
            self.thing.drop_select(_ABSENT, timeout=None)
        while not self.thing.match(put.tokens):
            time.sleep(0.01)
        while True:
            _read.append(self.thing.select(put.tokens, timeout=None))

    def lied_to(self) -> Calls:
        buffer, put, sink = self.thing, _numbered(0), Sink()
        asked = put.tokens
        inserted = 2 if isinstance(buffer, LookupEndpoint.Store) else 0

        def match(timeout: float | None) -> None:
            count = buffer.match(asked)
            assert type(count) is int and 0 <= count <= len(asked), f"{count} of {len(asked)} tokens match"

        def read(timeout: float | None) -> None:
            answered(asked, buffer.select(asked, min_tokens=1, timeout=timeout), min_tokens=1)

        def read_layers(timeout: float | None) -> None:
            entry = buffer.select(asked, min_tokens=1, sink=sink, timeout=timeout)
            answered(asked, entry, min_tokens=1, sink=sink)

        return {
            **{f"insert {number}": partial(insert, buffer, put) for number in range(inserted)},
            "drop_select": lambda timeout: answered(asked, buffer.drop_select(asked, timeout=timeout)),
            "match": match,
            "select": read,
            "select into a sink": read_layers,
            "drop_select of any": lambda timeout: answered(None, buffer.drop_select(None, timeout=timeout)),
        }

    def closed(self) -> bool:
        return bool(self.thing.is_lost)

    def is_still_open(self) -> None:
        waits.until(lambda: self.thing.is_lost, what="is_lost of an end whose store is gone")


class LookupEnds(Ends):
    """A store and one end that reaches it."""

    roles: ClassVar[Sequence[str]] = ("holding", "reaching")
    keeps_offer = False  # a pipe that was connected in vain would come first
    suite: LookupSuite

    def prepare(self) -> None:
        fields = fields_of(self.context)
        timeout_s = fields.pop("timeout_s", None)
        with NamedExhaustion("building a lookup buffer"):  # as kvplug's own builder does
            self._endpoint = self.suite.endpoint(_ROOM * PART_BYTES + PART_BYTES // 2, timeout_s)
        pipes = self.suite.pipes if self.is_local else self.suite.remote_pipes
        self._pipes = pipe_endpoint(pipes, self.suite.timeout_s, {}, **fields)

    def offer(self) -> list[str]:
        """A listener for each pipe, since one accepts the pipes of a process in any order."""
        self._listeners: list[PipeListener] = []
        for _ in ("signal", "data"):
            self._listeners.append(self._pipes.listen())
            self.suite.later(self._listeners[-1].close)
        return [each.contact for each in self._listeners]

    def accept(self) -> End:
        signal, data = (self._ended(each.accept(timeout=self.timeout_s)) for each in self._listeners)
        store = self._ended(self._endpoint.hold())
        store.attach(signal, data)
        return LookupEnd("holding", store, self.suite.evicts)

    def connect(self, role: int, contact: Sequence[str]) -> End:
        signal, data = (self._ended(self._pipes.connect(each, timeout=self.timeout_s)) for each in contact)
        return LookupEnd("reaching", self._ended(self._endpoint.reach(signal, data)), self.suite.evicts)

    def _ended(self, end: Any) -> Any:
        """End it with the suite's scope."""
        self.suite.later(end.abort)
        return end

    def content(self, role: int, number: int) -> Put:
        return _numbered(100 + number)


class LookupGeneral(LookupSuite, General):
    """The general laws for lookup buffers."""

    lies = 60

    @property
    def lied_to_processes(self) -> str:
        return self.missing_pipes or super().lied_to_processes

    def ends(self, **context: Any) -> LookupEnds:
        return LookupEnds(self, context)

    @law("LOOKUP-7", "LOOKUP-4", needs="another_host")
    def test_entries_are_taken_whole_from_another_host(self) -> None:
        ends = self.between_hosts()
        for number in range(1, 4):
            self.exchange(ends, number)
