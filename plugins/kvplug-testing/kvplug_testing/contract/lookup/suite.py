"""The base of the lookup suite: stores, ends that reach them, and calls that must end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import attrs
import pytest

from kvplug import TimeoutError
from kvplug.transport import (
    Credentials,
    Entry,
    Kind,
    LookupBuffer,
    LookupContext,
    LookupEndpoint,
    LookupStore,
    Pipe,
    PipeContext,
    PipeEndpoint,
    check_options,
)
from kvplug_testing import peers, waits
from kvplug_testing.contract import base
from kvplug_testing.contract.base import Contract
from kvplug_testing.contract.lookup.entries import Put, sized
from kvplug_testing.contract.lookup.pausable_pipe import PausablePipe
from kvplug_testing.contract.suite_ref import suite_from_ref
from kvplug_testing.waits import Call

SOON_S = 0.3
"""The timeout of a call that must not succeed."""

at_both_ends = pytest.mark.parametrize("end", ["holding", "reaching"])
"""Run a test at the end that holds the entries and at one that reaches it."""


@attrs.frozen
class PausedCall:
    """A call of a remote end that is paused in the middle of an entry."""

    end: LookupBuffer
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
    data_pipe_options: ClassVar[Mapping[str, Any]] = MappingProxyType({"max_in_flight_bytes": 2048})
    """Options of the pipes that carry the entries: narrow, so that an entry stops in the middle without a
    receiver."""
    passes: ClassVar[int] = 1
    """How many messages of an entry pass on the data pipe before a pause in its middle. 0 if an entry is a
    single message."""
    evicts: ClassVar[bool] = False
    """Whether an insert that finds no room removes entries, rather than wait until some were taken."""
    timeout_s: ClassVar[float] = 20.0
    """The context's ``timeout_s``: what counts where a call says nothing."""

    @property
    def waits_for_room(self) -> str:
        return "inserts make room by removing entries (evicts)" if self.evicts else ""

    @property
    def makes_room(self) -> str:
        return "" if self.evicts else "inserts wait for room (evicts is not set)"

    def make_endpoint(self, context: LookupContext) -> LookupEndpoint:
        """The transport's factory, called. Override it for a transport that is not installed."""
        return self.installed("make_endpoint").load_factory()(context)  # type: ignore[no-any-return]

    # -- ends in this process ------------------------------------------------------------------

    def endpoint(self, buffer_size: int = 64 << 20, timeout_s: float | None = None) -> LookupEndpoint:
        return self.make_endpoint(
            LookupContext(
                options=self.made_options(), buffer_size=buffer_size, timeout_s=timeout_s or self.timeout_s
            )
        )

    def hold(self, buffer_size: int = 64 << 20, **given: Any) -> LookupStore:
        """An empty store, aborted at the end of the test."""
        store = self.endpoint(buffer_size, **given).hold()
        self.later(store.abort)
        return store

    def reach(self, store: LookupStore, **given: Any) -> LookupBuffer:
        """An end in this process that reaches the store, aborted at the end of the test."""
        return self.reach_pausable(store, **given)[0]

    def reach_pausable(self, store: LookupStore, **given: Any) -> tuple[LookupBuffer, PausablePipe]:
        """Such an end, and its data pipe, which can be paused."""
        our_signal, their_signal = self.pipe_pair()
        our_data, their_data = self.pipe_pair(**self.data_pipe_options)
        store.attach(their_signal, their_data)
        data_pipe = PausablePipe(our_data)
        end = self.endpoint(**given).reach(our_signal, data_pipe)
        self.later(end.abort)
        return end, data_pipe

    def opened(self, end: str, buffer_size: int = 64 << 20) -> tuple[LookupStore, LookupBuffer]:
        """A store and the tested end: the store itself, or an end that reaches it."""
        store = self.hold(buffer_size)
        return store, store if end == "holding" else self.reach(store)

    def pipe_pair(self, **options: Any) -> tuple[Pipe, Pipe]:
        """Two connected pipes in this process. The caller closes them."""
        end = pipe_endpoint(self.pipes, self.timeout_s, options)
        listener = end.listen()
        try:
            connecting = Call(lambda: end.connect(listener.contact))
            accepted = listener.accept(timeout=waits.patience_s)
            self.later(accepted.abort)
            connected: Pipe = connecting.result()
            self.later(connected.abort)
        finally:
            listener.close()
        return connected, accepted

    def pause_in_entry(self, data_pipe: PausablePipe, call: Callable[[], Any]) -> Call:
        """Start a call that receives an entry, and pause it in the middle."""
        data_pipe.pause_after(self.passes)
        held_up = Call(call)
        assert data_pipe.wait_until_paused(waits.patience_s), (
            "the second tensor of an entry is not received over the data pipe that was given"
            f" (passes = {self.passes}); the call ended with {held_up.error!r}"
        )
        return held_up

    def paused_call(self, store: LookupStore, verb: str, timeout: float | None = None) -> PausedCall:
        """Insert an entry, and pause a remote end's ``select`` or ``drop_select`` in the middle of it.

        ``timeout=None`` is :data:`waits.patience_s`.
        """
        end, data_pipe = self.reach_pausable(store)
        put = sized([1, 2, 3], layers=8)
        entry_id = inserted(store, put)
        within = waits.patience_s if timeout is None else timeout
        call = self.pause_in_entry(data_pipe, lambda: getattr(end, verb)([1, 2, 3], timeout=within))
        return PausedCall(end, data_pipe, put, entry_id, call)

    # -- ends in other processes ---------------------------------------------------------------

    @property
    def other_processes(self) -> str:
        reason = super().other_processes
        if not reason and not base._registry().owners(Kind.PIPE, self.remote_pipes):
            return f"the pipe {self.remote_pipes!r} to other processes is not installed (remote_pipes)"
        return reason

    def remote_listener(self, make: Callable[[str], peers.Peer]) -> tuple[peers.Peer, Pipe, Pipe]:
        """Another process, started by ``make(contact)``, and the two pipes to it."""
        listener = pipe_endpoint(self.remote_pipes, self.timeout_s, self.data_pipe_options).listen()
        self.later(listener.close)
        peer = make(listener.contact)
        pipes = [listener.accept(timeout=waits.patience_s) for _ in range(2)]
        for pipe in pipes:
            self.later(pipe.abort)
        return peer, pipes[0], pipes[1]

    def remote_reach(self, store: LookupStore, what: Callable[..., Any], *args: Any) -> peers.Peer:
        """Another process that reaches the store, and runs ``what(parent, end, data_pipe, *args)``.

        ``what`` is a function at the top level of an importable module.
        """
        where = f"{what.__module__}:{what.__qualname__}"
        peer, signal, data = self.remote_listener(
            lambda contact: self.start_forked(
                f"{__name__}:run_remote_reach", self.suite_ref(), contact, where, list(args)
            )
        )
        store.attach(signal, data)
        return peer

    def remote_store(self) -> tuple[peers.Peer, LookupBuffer]:
        """A store in another process that holds a well-known entry, and an end here that reaches it."""
        peer, signal, data = self.remote_listener(
            lambda contact: self.start_forked(f"{__name__}:run_remote_store", self.suite_ref(), contact)
        )
        end = self.endpoint().reach(signal, data)
        self.later(end.abort)
        assert peer.recv(waits.patience_s) == "it holds"
        return peer, end

    def import_all(self) -> None:
        import torch  # noqa: F401

        if not self.other_processes:
            remote_pipes: Any = base._registry().get(Kind.PIPE, self.remote_pipes)
            remote_pipes.load_factory()
        super().import_all()

    def warm_up(self) -> None:
        """Run one large operation: torch starts its threads then and keeps them."""
        import torch

        torch.ones(1 << 20).add_(1)


def pipe_endpoint(name: str, timeout_s: float, options: Mapping[str, Any], **context: Any) -> PipeEndpoint:
    spec: Any = base._registry().get(Kind.PIPE, name)
    cls = spec.load_options()
    made = None if cls is None else check_options(cls, dict(options), where=f"options.{name}")
    given = {"credentials": Credentials(), **context}
    return spec.load_factory()(PipeContext(options=made, timeout_s=timeout_s, **given))  # type: ignore[no-any-return]


def run_remote_reach(
    parent: peers.Parent, suite_ref: dict[str, Any], contact: str, where: str, args: list[Any]
) -> Any:
    """In another process: reach the store, and run the function."""
    import importlib

    module, _, name = where.rpartition(":")
    what = getattr(importlib.import_module(module), name)
    suite = suite_from_ref(suite_ref)
    pipes = pipe_endpoint(suite.remote_pipes, suite.timeout_s, suite.data_pipe_options)
    signal = pipes.connect(contact)
    data_pipe = PausablePipe(pipes.connect(contact))
    return what(parent, suite.endpoint().reach(signal, data_pipe), data_pipe, *args)


def run_remote_store(parent: peers.Parent, suite_ref: dict[str, Any], contact: str) -> None:
    """In another process: hold a store with one entry until the parent sends a value."""
    suite = suite_from_ref(suite_ref)
    pipes = pipe_endpoint(suite.remote_pipes, suite.timeout_s, suite.data_pipe_options)
    signal, data = pipes.connect(contact), pipes.connect(contact)
    store = suite.endpoint().hold()
    put = known_entry()
    store.insert(put.tokens, put.roi, put.key, put.value, put.hidden)
    store.attach(signal, data)
    parent.send("it holds")
    parent.recv(None)
    store.close(5)


def known_entry() -> Put:
    """An entry that is the same in every process."""
    import torch

    key = torch.arange(4 * 3 * 2 * 64, dtype=torch.float32).reshape(4, 3, 2, 64)
    return Put(tokens=[7, 8, 9], key=key, value=key + 1, hidden=key[0] + 2)


# -- calls that must end in time -------------------------------------------------------------------


def inserted(store: LookupBuffer, put: Put, timeout: float | None = None) -> int:
    """Insert an entry, which must fit in time. Returns its id."""
    return Call(lambda: insert(store, put, timeout)).result(waits.patience_s + 1)  # type: ignore[no-any-return]


def insert(store: LookupBuffer, put: Put, timeout: float | None = None) -> int:
    """Call ``insert`` directly. ``timeout=None`` is :data:`waits.patience_s`."""
    return store.insert(
        put.tokens,
        put.roi,
        put.key,
        put.value,
        put.hidden,
        extra=put.extra,
        metadata=put.metadata,
        timeout=waits.patience_s if timeout is None else timeout,
    )


def taken(end: LookupBuffer, tokens: Any, roi: Any = None, *, extra: bytes = b"") -> Entry:
    """Take an entry, which must be available in time."""
    within = waits.patience_s
    call = Call(lambda: end.drop_select(tokens, roi, extra=extra, timeout=within))
    return call.result(within + 1)  # type: ignore[no-any-return]


def read(end: LookupBuffer, tokens: Any, roi: Any = None, **given: Any) -> Entry:
    """Read an entry, which must be in the store."""
    within = waits.patience_s
    return Call(lambda: end.select(tokens, roi, timeout=within, **given)).result(within + 1)  # type: ignore[no-any-return]


def matched(end: LookupBuffer, tokens: Any, roi: Any = None, *, extra: bytes = b"") -> int:
    return Call(lambda: end.match(tokens, roi, extra=extra)).result()  # type: ignore[no-any-return]


def missed(
    end: LookupBuffer, tokens: Any, roi: Any = None, *, extra: bytes = b"", timeout: float = SOON_S
) -> None:
    """Check that no matching entry is returned."""
    call = Call(lambda: end.drop_select(tokens, roi, extra=extra, timeout=timeout)).end()
    if call.error is None:
        raise AssertionError(f"a query that matches nothing was given the entry {call.value.header.entry_id}")
    call.raised(TimeoutError)
