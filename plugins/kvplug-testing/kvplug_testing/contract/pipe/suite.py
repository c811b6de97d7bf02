"""The base of the pipe suite: endpoints, connected pairs, and clogged pairs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, ClassVar

import attrs
import pytest

from kvplug import TimeoutError
from kvplug.kit import Kind
from kvplug.transport import Credentials, Pipe, PipeEndpoint, PipeListener, Transfer
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract.base import Contract, in_time
from kvplug_testing.contract.pipe.content import numbered
from kvplug_testing.waits import Call

MIB = 1 << 20
LIMIT = 2 * MIB
"""``max_in_flight_bytes`` of pairs in tests of the limit."""

MOST_ACCEPTED = 128 * MIB
"""A pipe that accepts this many bytes without a receiver has no limit."""

PipePair = tuple[Pipe, Pipe]


class PipeSuite(Contract):
    """The subject, and how its ends are made. Authors set the class attributes."""

    kind: ClassVar[Kind] = Kind.PIPE
    limit_option: ClassVar[str] = "max_in_flight_bytes"
    """The option that bounds what is unsent (law PIPE-2). Empty where there is none: the tests of the bound
    are skipped then."""
    beyond_limit_bytes: ClassVar[int] = 4 * MIB
    """How many more bytes the operating system or the device may hold while the receiver is stopped (law
    PIPE-3)."""
    timeout_s: ClassVar[float] = 20.0
    """The context's ``timeout_s``: the timeout of a call that gives none."""
    device: ClassVar[str] = ""
    """The context's ``device``. Empty is ``cpu`` where the transport claims it, else the first by name that
    it claims. A tensor of each claimed device is sent in any case; all others are CPU tensors."""

    def make_endpoint(self, context: PipeEndpoint.Context) -> PipeEndpoint:
        """The transport's factory, called. Override it for a transport that is not installed."""
        return self.installed("make_endpoint").load_factory()(context)  # type: ignore[no-any-return]

    # -- ends in this process ------------------------------------------------------------------

    def endpoint(self, limit: int | None = None, **context: Any) -> PipeEndpoint:
        """An endpoint, with this limit of unsent bytes if there is such an option. ``context``: what differs
        from the suite's.
        """
        limited = {} if limit is None or not self.limit_option else {self.limit_option: limit}
        usual = PipeEndpoint.Context(
            options=self.made_options(**limited),
            credentials=Credentials(),
            device=self.device or next(iter(self.devices), "cpu"),
            timeout_s=self.timeout_s,
        )
        return self.make_endpoint(attrs.evolve(usual, **context))

    def pair(self, limit: int | None = None, **context: Any) -> PipePair:
        """Two connected pipes in this process, aborted at the end of the test."""
        end = self.endpoint(limit, **context)
        with contextlib.closing(end.listen()) as listener:
            return self.join(end, listener)

    def limited_pair(self, limit: int = LIMIT) -> PipePair:
        """A pair whose limit of unsent bytes is ``limit``. Skips the test if there is no such option."""
        if not self.limit_option:
            pytest.skip(f"{self.called} has no option that bounds what is unsent (limit_option)")
        return self.pair(limit)

    def listen(self, end: PipeEndpoint | None = None) -> PipeListener:
        """A listener that is closed at the end of the test."""
        listener = (end or self.endpoint()).listen()
        self.later(listener.close)
        return listener

    def join(self, end: PipeEndpoint, listener: PipeListener) -> PipePair:
        """Two connected pipes over an existing listener, to which nothing else connects."""
        connecting = self.connecting(end, listener.contact)
        accepted = self.accept(listener)
        return connecting.result(waits.patience_s + 1), accepted

    def connecting(self, end: PipeEndpoint, contact: str, timeout: float | None = None) -> Call:
        """A call that connects, by default in time. Its pipe is aborted at the end of the test, even if that
        has failed meanwhile.
        """
        within = waits.patience_s if timeout is None else timeout
        call = Call(lambda: end.connect(contact, timeout=within))
        self.later(lambda: call.ended and call.value is not None and call.value.abort())
        return call

    @property
    def devices(self) -> list[str]:
        """The claimed devices by name, "cpu" first. A class that overrides ``make_endpoint`` claims only
        "cpu".
        """
        claimed = {"cpu"} if self.spec is None else self.spec.capabilities.devices
        return sorted(claimed, key=lambda name: (name != "cpu", name))

    @property
    def both_ways(self) -> str:
        """The reason to skip a test, for ``needs``."""
        duplex = self.spec is None or self.spec.capabilities.full_duplex
        return "" if duplex else f"{self.called} does not claim full_duplex"

    def accept(self, listener: PipeListener) -> Pipe:
        """The next pipe, which must connect in time; aborted at the end of the test."""
        pipe: Pipe = in_time(listener.accept)
        self.later(pipe.abort)
        return pipe


def received(pipe: Pipe, out: Any = None) -> Any:
    """The next message of a pipe, which must arrive in time."""
    return in_time(pipe.recv_tensor, out)


def sent(pipe: Pipe, message: Any) -> Transfer:
    """The transfer of a message that must be accepted in time."""
    return in_time(pipe.send_tensor, message)  # type: ignore[no-any-return]


def drain(pipe: Pipe, numbers: Iterable[int], nbytes: int = MIB // 4) -> None:
    """Check that the next messages of a pipe are those of :func:`fill` with these numbers."""
    for number in numbers:
        assert_same(numbered(number, nbytes), received(pipe), f"message {number}")


def passes(sender: Pipe, receiver: Pipe, message: Any, out: Any = None) -> None:
    """Check that a message arrives, in ``out`` if there is one, and that its transfer ends."""
    sending = Call(lambda: sender.send_tensor(message))
    got = received(receiver, out)
    assert out is None or got is out, "something else than out was returned"
    assert_same(message, got)
    sending.result().wait(waits.patience_s)


def fill(pipe: Pipe, nbytes: int = MIB // 4, timeout: float = 0.2) -> list[Transfer]:
    """Clog a pipe: send until there is no room. Returns the transfers of the accepted messages.

    Message n is :func:`~kvplug_testing.contract.pipe.content.numbered`.
    """
    transfers: list[Transfer] = []
    with contextlib.suppress(TimeoutError):
        while len(transfers) * nbytes < MOST_ACCEPTED:
            transfers.append(pipe.send_tensor(numbered(len(transfers), nbytes), timeout=timeout))
        pytest.fail(f"{MOST_ACCEPTED} bytes were accepted, and none was received: nothing bounds them")
    return transfers
