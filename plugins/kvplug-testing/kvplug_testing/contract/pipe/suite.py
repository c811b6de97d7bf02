"""The base of the pipe suite: endpoints, connected pairs, clogged pairs, and ends in other processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import pytest

from kvplug import TimeoutError
from kvplug.transport import Credentials, Kind, Pipe, PipeContext, PipeEndpoint, PipeListener, Transfer
from kvplug_testing import peers, waits
from kvplug_testing.contract.base import Contract
from kvplug_testing.contract.pipe.content import numbered
from kvplug_testing.contract.suite_ref import name_of, named, suite_from_ref
from kvplug_testing.waits import Call

MIB = 1 << 20
LIMIT = 2 * MIB
"""``max_in_flight_bytes`` of pairs in tests of the limit."""

MOST_ACCEPTED = 128 * MIB
"""A pipe that accepts this many bytes without a receiver has no limit."""

CHILD_S = 900.0
"""The time limit of another process: longer than that of any test."""

PipePair = tuple[Pipe, Pipe]


class PipeSuite(Contract):
    """The subject, and how its ends are made. Authors set the class attributes."""

    kind: ClassVar[Kind] = Kind.PIPE
    limit_option: ClassVar[str] = "max_in_flight_bytes"
    """The option that bounds what is unsent (law PIPE-2). Empty where there is none: the tests of the bound
    are skipped then."""
    beyond_limit_bytes: ClassVar[int] = 4 * MIB
    """What the operating system or the device may hold besides, with the receiver stopped (law PIPE-3)."""
    timeout_s: ClassVar[float] = 20.0
    """The context's ``timeout_s``: what counts where a call says nothing."""
    device: ClassVar[str] = ""
    """The context's ``device``. Empty is ``cpu`` where the transport claims it, else the first by name that
    it claims. A tensor of each claimed device is sent whatever this says; all others are CPU tensors."""

    def make_endpoint(self, context: PipeContext) -> PipeEndpoint:
        """The transport's factory, called. Override it for a transport that is not installed."""
        return self.installed("make_endpoint").load_factory()(context)  # type: ignore[no-any-return]

    # -- ends in this process ------------------------------------------------------------------

    def context(
        self, heartbeat_timeout_s: float = 10.0, max_message_bytes: int | None = None, **options: Any
    ) -> PipeContext:
        return PipeContext(
            options=self.made_options(**options),
            credentials=Credentials(),
            device=self.device or next(iter(self.devices), "cpu"),
            timeout_s=self.timeout_s,
            heartbeat_timeout_s=heartbeat_timeout_s,
            max_message_bytes=max_message_bytes,
        )

    def endpoint(self, **options: Any) -> PipeEndpoint:
        return self.make_endpoint(self.context(**options))

    def limited_endpoint(self, **context: Any) -> PipeEndpoint:
        """An endpoint with a limit of unsent bytes, if there is such an option. ``context``: its fields."""
        return self.make_endpoint(attrs.evolve(self.context(**self.limited()), **context))

    def pair(self, **options: Any) -> PipePair:
        """Two connected pipes in this process, aborted at the end of the test."""
        return self.pair_of(self.endpoint(**options))

    def pair_of(self, end: PipeEndpoint) -> PipePair:
        """Two connected pipes over an existing endpoint."""
        listener = end.listen()
        try:
            return self.join(end, listener)
        finally:
            listener.close()

    def join(self, end: PipeEndpoint, listener: PipeListener) -> PipePair:
        """Two connected pipes over an existing listener, to which nothing else connects."""
        connecting = Call(lambda: end.connect(listener.contact, timeout=waits.patience_s))
        accepted = Call(lambda: listener.accept(timeout=waits.patience_s)).result(waits.patience_s + 1)
        self.later(accepted.abort)
        connected = connecting.result()
        self.later(connected.abort)
        return connected, accepted

    def limited_pair(self, limit: int = LIMIT) -> PipePair:
        """A pair whose limit of unsent bytes is ``limit``."""
        return self.pair(**self.limited(limit))

    def limited(self, limit: int = LIMIT) -> dict[str, int]:
        """The option for that limit, as keyword arguments; nothing if :attr:`limit_option` is empty."""
        return {self.limit_option: limit} if self.limit_option else {}

    @property
    def a_limit(self) -> str:
        """The reason to skip a test, for ``needs``."""
        without = f"{self.called} has no option that bounds what is unsent (limit_option)"
        return "" if self.limit_option else without

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

    @property
    def both_ways_and_a_limit(self) -> str:
        """The reason to skip a test, for ``needs``."""
        return self.both_ways or self.a_limit

    # -- ends in other processes ---------------------------------------------------------------

    def connecting(self, contact: str, what: Callable[..., Any], *args: Any) -> peers.Peer:
        """Another process, which connects to ``contact`` and runs ``what(parent, pipe, *args)``.

        ``what`` is a function of an importable module's top level, as in
        :mod:`kvplug_testing.contract.pipe.remote`.
        """
        return self._runs("connecting_end", contact, name_of(what), list(args))

    def remote_pipe(self, what: Callable[..., Any], *args: Any) -> tuple[Pipe, peers.Peer]:
        """A pipe whose other end is in another process, as :meth:`connecting` starts it."""
        listener = self.endpoint().listen()
        try:
            child = self.connecting(listener.contact, what, *args)
            return self.accept(listener), child
        finally:
            listener.close()

    def remote_listener(self, what: Callable[..., Any]) -> tuple[str, peers.Peer]:
        """The contact of a listener in another process, which runs ``what(parent, listener)``."""
        child = self._runs("listening_end", name_of(what))
        return child.recv(), child

    def _runs(self, end: str, *args: Any) -> peers.Peer:
        return self.start_forked(f"{__name__}:{end}", self.suite_ref(), *args, timeout_s=CHILD_S)

    def accept(self, listener: PipeListener) -> Pipe:
        """The next pipe, which must connect in time; aborted at the end of the test."""
        within = waits.patience_s
        pipe: Pipe = Call(lambda: listener.accept(timeout=within)).result(within + 1)
        self.later(pipe.abort)
        return pipe

    def import_all(self) -> None:
        import torch  # noqa: F401

        import kvplug_testing.contract.pipe.remote  # noqa: F401

        super().import_all()

    def warm_up(self) -> None:
        """Run one large operation: torch starts its threads then and keeps them."""
        import torch

        torch.ones(1 << 20).add_(1)


def connecting_end(
    parent: peers.Parent, suite_ref: dict[str, Any], contact: str, what: str, args: Any
) -> Any:
    """In another process: connect, run the function, and close the pipe."""
    with suite_from_ref(suite_ref).endpoint().connect(contact) as pipe:
        return named(what)(parent, pipe, *args)


def listening_end(parent: peers.Parent, suite_ref: dict[str, Any], what: str) -> Any:
    """In another process: listen, report the contact, and run the function."""
    listener = suite_from_ref(suite_ref).endpoint().listen()
    try:
        parent.send(listener.contact)
        return named(what)(parent, listener)
    finally:
        listener.close()


def received(pipe: Pipe, out: Any = None) -> Any:
    """The next message of a pipe, which must arrive in time."""
    within = waits.patience_s
    return Call(lambda: pipe.recv_tensor(out, timeout=within)).result(within + 1)


def sent(pipe: Pipe, message: Any) -> Transfer:
    """The transfer of a message that must be accepted in time."""
    within = waits.patience_s
    return Call(lambda: pipe.send_tensor(message, timeout=within)).result(within + 1)  # type: ignore[no-any-return]


def fill(pipe: Pipe, nbytes: int = MIB // 4, timeout: float = 0.2) -> list[Transfer]:
    """Clog a pipe: send until there is no room. Returns the transfers of the accepted messages.

    Message n is :func:`~kvplug_testing.contract.pipe.content.numbered`.
    """
    transfers: list[Transfer] = []
    with contextlib.suppress(TimeoutError):
        while len(transfers) * nbytes < MOST_ACCEPTED:
            transfers.append(pipe.send_tensor(numbered(len(transfers), nbytes), timeout=timeout))
        pytest.fail(f"{MOST_ACCEPTED} bytes were accepted, and none has been received: there is no bound")
    return transfers
