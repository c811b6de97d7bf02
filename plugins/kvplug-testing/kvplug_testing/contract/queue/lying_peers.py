"""A writer or a reader that has proved its identity and lies (law ALL-10)."""

from __future__ import annotations

import functools
import zlib
from contextlib import suppress
from typing import Any, Final

import attrs

from kvplug import KvplugError
from kvplug.net.wire import encode
from kvplug.transport import MessageQueue, QueueHandle
from kvplug_testing import peers
from kvplug_testing.contract.lied_to import DIALS, LISTENS, LiedTo
from kvplug_testing.contract.queue.suite import CHUNK, QueueSuite
from kvplug_testing.contract.suite_ref import suite_from_ref
from kvplug_testing.tampering.conversing import Conversing
from kvplug_testing.tampering.relay import Relay
from kvplug_testing.tampering.victim import Ended, ended, victim
from kvplug_testing.waits import Call

_ATTACHED_S: Final = 300.0
_AHEAD_S: Final = 0.05
"""How long the honest end may write before the victim reads."""
_MESSAGES: Final[tuple[Any, ...]] = (7, {"a": [1, 2.5, None]}, b"bytes" * 100, "text", b"x" * (2 * CHUNK), [])
"""One of them is larger than a chunk."""


class LyingPeers(QueueSuite, LiedTo):
    """What a writer may say to a reader, and a reader to the writer."""

    _victim = f"{__name__}:run_victim"

    def _contact(self) -> Any:
        with self.endpoint().create() as writer:
            return writer.export_handle().as_plain()["data"]

    def _conversations(self, relay: Relay, role: str, child: peers.Peer) -> Conversing:
        return _Conversing(self, relay, role, child)


class _Conversing(Conversing):
    """A queue each: the victim reads what the honest end writes, or the other way around."""

    def __init__(self, suite: LyingPeers, relay: Relay, role: str, child: peers.Peer) -> None:
        super().__init__(relay, child)
        self._role = role
        self._suite = suite
        self._end: MessageQueue | None = None
        self._working: Call | None = None
        """Of the honest end: it reads or writes."""
        suite.later(self._hang_up)

    def _begin(self, join_s: float) -> None:
        endpoint = self._suite.endpoint()
        self.relay.leave()
        if self._role == LISTENS:
            self._child.send(["join", join_s])
            handle = QueueHandle.from_plain(self.relay.through_plain(self._answer()))
            with suppress(KvplugError):  # one of the two has refused the join
                self._end = Call(lambda: endpoint.create_from_handle(handle, 0, timeout=join_s)).result()
            if self._end is not None:
                self._working = Call(functools.partial(_read_all, self._end))
            return
        writer = self._end = endpoint.create()
        self._child.send(["join", join_s, self.relay.through_plain(writer.export_handle().as_plain())])
        if self._answer():
            self._working = Call(functools.partial(_write_all, writer))
            self._working.is_blocked(_AHEAD_S)

    def _go_on(self, call_s: float) -> Any:
        self._child.send(["go on", call_s])
        answer = self._answer()
        self._hang_up()
        return answer

    def _hang_up(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            Call(end.abort).end()
        working, self._working = self._working, None
        if working is not None:
            working.end()

    def _wanted(self) -> list[Any]:
        return [_described(message) for message in _MESSAGES] if self._role == DIALS else []


def _read_all(reader: MessageQueue) -> None:
    with suppress(KvplugError):
        while True:
            reader.dequeue(timeout=_ATTACHED_S)


def _write_all(writer: MessageQueue) -> None:
    with suppress(KvplugError):
        for message in _MESSAGES:
            writer.enqueue(message, timeout=_ATTACHED_S)


def _described(value: Any) -> Any:
    """Plain values that are equal for equal messages."""
    return [type(value).__name__, zlib.crc32(encode(value))]


# -- the victim's process ------------------------------------------------------------------------------


def run_victim(parent: peers.Parent, suite_ref: dict[str, Any], role: str) -> str:
    """In a child process: read or write as often as the parent wants."""
    suite: Any = suite_from_ref(suite_ref)
    suite.warm_up()
    with victim() as here:
        while True:
            order, *join = parent.recv(None)
            if order == "end":
                break
            calls = (_read if role == DIALS else _write)(parent, suite, *join)
            parent.send([[attrs.asdict(call) for call in calls], here.faults()])
        return here.grown()


def _read(parent: peers.Parent, suite: Any, join_s: float, plain: Any) -> list[Ended]:
    handle = QueueHandle.from_plain(plain)
    attach = functools.partial(suite.endpoint().create_from_handle, handle, 0, timeout=join_s)
    call = ended("create_from_handle", join_s, attach)
    queue, calls = call.value, [attrs.evolve(call, value=None)]
    parent.send(queue is not None)
    call_s = parent.recv(None)[1]
    if queue is None:
        return calls
    for _ in _MESSAGES:
        calls.append(
            attrs.evolve(
                ended("dequeue", call_s, lambda: _described(queue.dequeue(timeout=call_s))), is_receipt=True
            )
        )
        if calls[-1].error:
            break
    calls.append(ended("close", call_s, queue.close))
    return calls


def _write(parent: peers.Parent, suite: Any, join_s: float) -> list[Ended]:
    queue = suite.endpoint().create()
    parent.send(queue.export_handle().as_plain())
    calls: list[Ended] = []
    call_s = parent.recv(None)[1]
    for message in _MESSAGES:
        calls.append(ended("enqueue", call_s, functools.partial(queue.enqueue, message, timeout=call_s)))
        if calls[-1].error:
            break
    calls.append(ended("close", call_s, queue.close))
    return calls
