"""The other end of a pipe has proved its identity and lies (law ALL-10)."""

from __future__ import annotations

from contextlib import suppress
from functools import cache, partial
from typing import Any, Final

import attrs

from kvplug import CapacityError, KvplugError
from kvplug.transport import Pipe, PipeEndpoint, PipeListener, TensorMismatchError
from kvplug_testing import peers, waits
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract.base import law
from kvplug_testing.contract.lied_to import LISTENS, LiedTo, be_lied_to
from kvplug_testing.contract.pipe.suite import PipeSuite, received, sent
from kvplug_testing.contract.suite_ref import suite_from_ref
from kvplug_testing.tampering.conversing import Conversing
from kvplug_testing.tampering.relay import Relay
from kvplug_testing.tampering.victim import SLACK_S, Ended, ended
from kvplug_testing.waits import Call

_LARGE: Final = (1 << 18, 5)
"""Shape of the largest message: it may be split over several connections."""


class LyingPeers(PipeSuite, LiedTo):
    """What the other end of a pipe may say."""

    _victim = f"{__name__}:run_victim"

    def _contact(self) -> str:
        listener = self.endpoint().listen()
        try:
            return listener.contact
        finally:
            listener.close()

    def _conversations(self, relay: Relay, role: str, child: peers.Peer) -> Conversing:
        return _Conversing(self, relay, role, child)

    @law("ALL-10")
    def test_a_message_beyond_the_limit_is_refused_before_memory_is_taken_and_stays(self) -> None:
        import torch

        here, there = self.pair_of(self.make_endpoint(self.context(max_message_bytes=1000)))
        large, small = torch.arange(1001).to(torch.uint8), torch.arange(1000).to(torch.uint8)
        for message in (large, large, small):
            sent(here, message)
        out = torch.empty_like(large)
        for _ in range(2):
            for _ in range(2):
                Call(lambda: there.recv_tensor(timeout=waits.patience_s)).raised(CapacityError)
            out.fill_(0)
            assert_same(large, received(there, out), "it was not received into memory of the caller's")
        assert_same(small, received(there))


class _Conversing(Conversing):
    """Messages to a victim that has accepted, or connected to, the honest end."""

    def __init__(self, suite: LyingPeers, relay: Relay, role: str, child: peers.Peer) -> None:
        super().__init__(relay, child)
        self._role = role
        self._end = suite.endpoint()
        self._listener: PipeListener | None = None
        self._pipe: Pipe | None = None
        suite.later(self._hang_up)

    def _begin(self, join_s: float) -> None:
        # Each time at another listener: a late join belongs to no later conversation.
        self.relay.leave()
        with suppress(KvplugError):  # one of the two has refused the join
            if self._role == LISTENS:
                self._child.send(["join", join_s])
                contact = self.relay.through(self._answer())
                self._pipe = Call(lambda: self._end.connect(contact, timeout=join_s)).result()
            else:
                listener = self._listener = self._end.listen()
                self._child.send(["join", join_s, self.relay.through(listener.contact)])
                if self._answer():
                    self._pipe = Call(lambda: listener.accept(timeout=join_s)).result()
        if self._pipe is not None:
            for message in _messages():
                try:
                    self._pipe.send_tensor(message, timeout=join_s)
                except KvplugError:
                    break

    def _go_on(self, call_s: float) -> Any:
        self._child.send(["receive" if self._pipe is not None else "give up", call_s])
        answer = self._answer()
        self._hang_up()
        return answer

    def _hang_up(self) -> None:
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            Call(pipe.abort).end()
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def _wanted(self) -> list[Any]:
        return [_described(message) for message in _messages()]


@cache
def _messages() -> tuple[Any, ...]:
    import torch

    return (
        torch.arange(10),
        torch.arange(15, dtype=torch.float32).view(3, 5),
        None,
        torch.arange(_LARGE[0] * _LARGE[1], dtype=torch.int32).to(torch.uint8).view(_LARGE),
        torch.empty(0, 3),
        torch.tensor(True),
    )


def _described(tensor: Any) -> Any:
    """Plain values that are equal for equal tensors."""
    if tensor is None:
        return None
    import zlib

    import torch

    flat = tensor.detach().cpu().contiguous().view(-1)
    return [str(tensor.dtype), list(tensor.shape), zlib.crc32(flat.view(torch.uint8).numpy())]


# -- the victim's process ------------------------------------------------------------------------------


def run_victim(parent: peers.Parent, suite_ref: dict[str, Any], role: str) -> str:
    """In a child process: join and receive as often as the parent wants."""
    suite: Any = suite_from_ref(suite_ref)
    join = partial(_listen if role == LISTENS else _dial, parent, suite.endpoint())
    return be_lied_to(parent, suite, join, bounded=suite.devices == ["cpu"])


def _dial(parent: peers.Parent, end: PipeEndpoint, join_s: float, contact: str) -> list[Ended]:
    call = ended("connect", join_s, partial(end.connect, contact, timeout=join_s))
    pipe, calls = call.value, [attrs.evolve(call, value=None)]
    parent.send(pipe is not None)
    _, call_s = parent.recv(None)
    if pipe is not None:
        _receive_all(calls, pipe, call_s)
    return calls


def _listen(parent: peers.Parent, end: PipeEndpoint, join_s: float) -> list[Ended]:
    calls: list[Ended] = []
    listener = end.listen()
    try:
        parent.send(listener.contact)
        order, call_s = parent.recv(None)
        pipe = _accepted(listener, join_s) if order == "receive" else None
        if pipe is not None:
            _receive_all(calls, pipe, call_s)
    finally:
        listener.close()
    return calls


def _accepted(listener: Any, join_s: float) -> Any:
    """The pipe, or ``None``: a listener is not blamed for a peer that did not join as it should."""
    try:
        return Call(lambda: listener.accept(timeout=join_s)).result(join_s + SLACK_S)
    except KvplugError:
        return None


def _receive_all(calls: list[Ended], pipe: Any, call_s: float) -> None:
    """Receive what was sent, into memory of the pipe's and of this end's, send a little, and close."""
    import torch

    for number, message in enumerate(_messages()):
        out = torch.empty_like(message) if number % 2 and message is not None else None
        name = "recv_tensor()" if out is None else "recv_tensor(out=...)"
        call = ended(name, call_s, lambda: _described(pipe.recv_tensor(out, timeout=call_s)))  # noqa: B023
        if call.error == TensorMismatchError.__name__:
            calls.append(call)
            call = ended("recv_tensor()", call_s, lambda: _described(pipe.recv_tensor(timeout=call_s)))
        calls.append(attrs.evolve(call, is_receipt=True))
        if call.error:
            break
    send = partial(pipe.send_tensor, torch.arange(3), timeout=call_s)
    calls.append(attrs.evolve(ended("send_tensor", call_s, send), value=None))
    calls.append(ended("close", call_s, partial(pipe.close, call_s)))
