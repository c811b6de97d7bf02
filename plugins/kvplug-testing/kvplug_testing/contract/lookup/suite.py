"""The base of the lookup suite: stores, ends that reach them, and calls that must end."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import pytest

from kvplug import TimeoutError
from kvplug.kit import Kind, check_options
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Credentials,
    Deadline,
    Entry,
    LookupBuffer,
    LookupEndpoint,
    Pipe,
    PipeEndpoint,
    Timeout,
)
from kvplug_testing import waits
from kvplug_testing.contract import base
from kvplug_testing.contract.base import Contract, in_time
from kvplug_testing.contract.lookup.entries import Put, sized
from kvplug_testing.pairs import PipeAround, PipePairs
from kvplug_testing.waits import Call

if TYPE_CHECKING:
    from torch import Tensor

SOON_S = 0.3
"""The timeout of a call that must not succeed."""

_IN_FLIGHT = 2048
"""Bytes in flight on the pipes that carry the entries: few, so that an entry stops in the middle without a
receiver."""

at_both_ends = pytest.mark.parametrize("end", ["holding", "reaching"])
"""Run a test at the end that holds the entries and at one that reaches it."""


class PausablePipe(PipeAround):
    """A pipe that can be paused. A receive that times out loses nothing."""

    def __init__(self, pipe: Pipe) -> None:
        super().__init__(pipe)
        self.left: int | None = None
        """How many more messages pass before a pause; ``None``: it does not pause."""
        self.is_paused = threading.Event()
        """Set once a receive is paused."""

    def _receive_tensor(self, out: Tensor | None, timeout: Timeout) -> Tensor | None:
        deadline = Deadline.after(timeout, 60.0)
        while self.left == 0 and not self.closed:
            self.is_paused.set()
            if deadline.expired:
                raise TimeoutError("nothing came in time")
            time.sleep(0.002)
        received = super()._receive_tensor(out, deadline.remaining())
        if self.left:
            self.left -= 1
        return received


@attrs.frozen
class PausedCall:
    """A call of a remote end that is paused in the middle of an entry."""

    end: LookupBuffer
    signal: Pipe
    data_pipe: PausablePipe
    put: Put
    entry_id: int
    call: Call


class LookupSuite(Contract):
    """The subject, and how its ends are made. Authors set the class attributes."""

    kind: ClassVar[Kind] = Kind.LOOKUP_BUFFER
    pipes: ClassVar[str] = "memory"
    """The pipe transport over which reaching ends of this process are connected."""
    remote_pipes: ClassVar[str] = "cpu"
    """The pipe transport for reaching ends in other processes. Where it is not installed, their tests are
    skipped."""
    passes: ClassVar[int] = 1
    """How many messages of an entry pass on the data pipe before a pause in its middle. 0 if an entry is a
    single message."""
    evicts: ClassVar[bool] = False
    """Whether an insert that finds no room removes entries, rather than wait until some were taken."""
    timeout_s: ClassVar[float] = 20.0
    """The context's ``timeout_s``: the timeout of a call that gives none."""

    @property
    def makes_room(self) -> str:
        return "" if self.evicts else "inserts wait for room (evicts is not set)"

    def make_endpoint(self, context: LookupEndpoint.Context) -> LookupEndpoint:
        """The transport's factory, called. Override it for a transport that is not installed."""
        return self.installed("make_endpoint").load_factory()(context)  # type: ignore[no-any-return]

    def endpoint(self, buffer_size: int = 64 << 20, timeout_s: float | None = None) -> LookupEndpoint:
        return self.make_endpoint(
            LookupEndpoint.Context(
                options=self.made_options(), buffer_size=buffer_size, timeout_s=timeout_s or self.timeout_s
            )
        )

    def hold(self, buffer_size: int = 64 << 20, **given: Any) -> LookupEndpoint.Store:
        """An empty store, aborted at the end of the test."""
        store = self.endpoint(buffer_size, **given).hold()
        self.later(store.abort)
        return store

    def reach(self, store: LookupEndpoint.Store) -> LookupBuffer:
        """An end in this process that reaches the store, aborted at the end of the test."""
        return self._reach(store)[0]

    def _reach(self, store: LookupEndpoint.Store) -> tuple[LookupBuffer, Pipe, PausablePipe]:
        """Such an end, and its pipes."""
        our_signal, their_signal = self.pipe_pair()
        our_data, their_data = self.pipe_pair(max_in_flight_bytes=_IN_FLIGHT)
        store.attach(their_signal, their_data)
        data_pipe = PausablePipe(our_data)
        end = self.endpoint().reach(our_signal, data_pipe)
        self.later(end.abort)
        return end, our_signal, data_pipe

    def opened(self, end: str, buffer_size: int = 64 << 20) -> tuple[LookupEndpoint.Store, LookupBuffer]:
        """A store and the tested end: the store itself, or an end that reaches it."""
        store = self.hold(buffer_size)
        return store, store if end == "holding" else self.reach(store)

    def pipe_pair(self, **options: Any) -> tuple[Pipe, Pipe]:
        """Two connected pipes in this process."""
        pairs = self._stack.enter_context(PipePairs())
        return pairs.local(pipe_endpoint(self.pipes, self.timeout_s, options))

    def paused_call(self, store: LookupEndpoint.Store, verb: str, timeout: float | None = None) -> PausedCall:
        """Insert an entry, and pause a remote end's ``select`` or ``drop_select`` in the middle of it.

        ``timeout=None`` is :data:`waits.patience_s`.
        """
        end, signal, data_pipe = self._reach(store)
        put = sized([1, 2, 3], layers=8)
        entry_id = inserted(store, put)
        within = waits.patience_s if timeout is None else timeout
        data_pipe.left = self.passes
        call = Call(lambda: getattr(end, verb)([1, 2, 3], timeout=within))
        assert data_pipe.is_paused.wait(waits.patience_s), (
            "the second tensor of an entry is not received over the data pipe that was given"
            f" (passes = {self.passes}); the call ended with {call.error!r}"
        )
        return PausedCall(end, signal, data_pipe, put, entry_id, call)

    # -- other processes -----------------------------------------------------------------------

    @property
    def other_processes(self) -> str:
        return super().other_processes or self.missing_pipes

    @property
    def missing_pipes(self) -> str:
        """The reason to skip a test, for ``needs``."""
        if base._registry().owners(Kind.PIPE, self.remote_pipes):
            return ""
        return f"the pipe {self.remote_pipes!r} to other processes is not installed (remote_pipes)"

    def import_all(self) -> None:
        if not self.other_processes:
            remote_pipes: Any = base._registry().get(Kind.PIPE, self.remote_pipes)
            remote_pipes.load_factory()
        super().import_all()


def pipe_endpoint(name: str, timeout_s: float, options: Mapping[str, Any], **context: Any) -> PipeEndpoint:
    spec: Any = base._registry().get(Kind.PIPE, name)
    cls = spec.load_options()
    made = None if cls is None else check_options(cls, dict(options), where=f"options.{name}")
    given = {"credentials": Credentials(), **context}
    return spec.load_factory()(PipeEndpoint.Context(options=made, timeout_s=timeout_s, **given))  # type: ignore[no-any-return]


# -- calls that must end in time -------------------------------------------------------------------


def insert(store: LookupBuffer, put: Put, timeout: Timeout = DEFAULT_TIMEOUT) -> int:
    parts = (put.tokens, put.roi, put.key, put.value, put.hidden)
    return store.insert(*parts, extra=put.extra, metadata=put.metadata, timeout=timeout)


def inserted(store: LookupBuffer, put: Put) -> int:
    """Insert an entry, which must fit in time. Returns its id."""
    return in_time(insert, store, put)  # type: ignore[no-any-return]


def taken(end: LookupBuffer, tokens: Any, roi: Any = None, *, extra: bytes = b"") -> Entry:
    """Take an entry, which must be available in time."""
    return in_time(end.drop_select, tokens, roi, extra=extra)  # type: ignore[no-any-return]


def read(end: LookupBuffer, tokens: Any, roi: Any = None, **given: Any) -> Entry:
    """Read an entry, which must be in the store."""
    return in_time(end.select, tokens, roi, **given)  # type: ignore[no-any-return]


def matched(end: LookupBuffer, tokens: Any, roi: Any = None, *, extra: bytes = b"") -> int:
    return Call(partial(end.match, tokens, roi, extra=extra)).result()  # type: ignore[no-any-return]


def missed(
    end: LookupBuffer, tokens: Any, roi: Any = None, *, extra: bytes = b"", timeout: float = SOON_S
) -> None:
    """Check that no matching entry is returned."""
    waits.raises(TimeoutError, partial(end.drop_select, tokens, roi, extra=extra, timeout=timeout))
