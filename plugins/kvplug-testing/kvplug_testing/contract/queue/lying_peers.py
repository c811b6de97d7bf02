"""A writer or a reader that has proved its identity and lies (law ALL-10)."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, suppress
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
        self._over = ExitStack()
        """Ends what the honest end does in this conversation."""
        suite.later(self._over.close)

    def _begin(self, join_s: float) -> None:
        endpoint = self._suite.endpoint()
        self.relay.leave()
        if self._role == LISTENS:
            self._child.send(["join", join_s])
            handle = QueueHandle.from_plain(self.relay.through_plain(self._answer()))
            with suppress(KvplugError):  # one of the two has refused the join
                self._work(Call(lambda: endpoint.create_from_handle(handle, 0, timeout=join_s)).result())
            return
        writer = endpoint.create()
        self._over.callback(writer.abort)
        self._child.send(["join", join_s, self.relay.through_plain(writer.export_handle().as_plain())])
        if self._answer():
            self._work(writer).is_blocked(_AHEAD_S)

    def _work(self, end: MessageQueue) -> Call:
        """The honest end reads or writes everything."""

        def work() -> None:
            with suppress(KvplugError):
                for message in _MESSAGES:
                    if end.is_writer:
                        end.enqueue(message, timeout=_ATTACHED_S)
                    else:
                        end.dequeue(timeout=_ATTACHED_S)

        call = Call(work)
        self._over.callback(call.end)
        self._over.callback(lambda: Call(end.abort).end())
        return call

    def _go_on(self, call_s: float) -> Any:
        self._child.send(["go on", call_s])
        answer = self._answer()
        self._over.close()
        return answer

    def _wanted(self) -> list[Any]:
        return [_described(message) for message in _MESSAGES] if self._role == DIALS else []


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
                return here.grown()
            calls = [attrs.asdict(call) for call in _converse(parent, suite.endpoint(), role, *join)]
            parent.send([calls, here.faults()])


def _converse(
    parent: peers.Parent, endpoint: Any, role: str, join_s: float, plain: Any = None
) -> Iterator[Ended]:
    """The victim's calls, up to the first that fails."""
    if role == DIALS:
        handle = QueueHandle.from_plain(plain)
        attach = functools.partial(endpoint.create_from_handle, handle, 0, timeout=join_s)
        call = ended("create_from_handle", join_s, attach)
        queue = call.value
        yield attrs.evolve(call, value=None)
        parent.send(queue is not None)
    else:
        queue = endpoint.create()
        parent.send(queue.export_handle().as_plain())
    call_s = parent.recv(None)[1]
    if queue is None:
        return
    for message in _MESSAGES:
        if role == DIALS:
            call = ended("dequeue", call_s, lambda: _described(queue.dequeue(timeout=call_s)))
        else:
            call = ended("enqueue", call_s, functools.partial(queue.enqueue, message, timeout=call_s))
        yield attrs.evolve(call, is_receipt=role == DIALS)
        if call.error:
            break
    yield ended("close", call_s, queue.close)
