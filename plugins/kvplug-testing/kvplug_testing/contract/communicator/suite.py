"""The base of the communicator suite: ranks, as threads or as processes, that execute calls.

A test describes each rank's calls in plain values, so that a rank may be a thread or a process.
"""

from __future__ import annotations

import abc
import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import attrs

import kvplug
import kvplug.transport
from kvplug import KvplugError, StatelessGroup
from kvplug.transport import CommunicatorContext, Credentials, DeviceCommunicator, Kind
from kvplug_testing import peers, waits
from kvplug_testing.contract import leaving
from kvplug_testing.contract.base import Contract, at_host
from kvplug_testing.contract.communicator.calls import CallOutcome, carried, perform
from kvplug_testing.contract.suite_ref import suite_from_ref
from kvplug_testing.waits import Call

WORLD = 3
LIFE_S = 300.0
"""The time limit of a rank's process: longer than any test. The process ends with its test."""


class Rank(abc.ABC):
    """One rank of a group under test."""

    def __init__(self, number: int) -> None:
        self.number = number

    @abc.abstractmethod
    def begin(self, method: str, *args: Any, **given: Any) -> Pending:
        """Start the call without waiting for it."""

    @abc.abstractmethod
    def leave(self) -> None:
        """End without telling the other ranks; a process is killed."""

    @property
    def pid(self) -> int:
        return os.getpid()


@attrs.frozen
class Pending:
    """A started call of a rank."""

    outcome: Callable[[], CallOutcome]
    """Waits until the call ends."""
    is_blocked: Callable[[], bool]
    """Whether it is still blocked after a short time."""

    def check_blocked(self, why: str = "") -> None:
        """Assert that it is blocked."""
        assert self.is_blocked(), f"it did not wait{why}: {self.outcome()}"


class LocalRank(Rank):
    """A rank that is a thread of this process."""

    def __init__(self, number: int, group: StatelessGroup, made: DeviceCommunicator) -> None:
        super().__init__(number)
        self.group, self.made = group, made

    def begin(self, method: str, *args: Any, **given: Any) -> Pending:
        plain = [carried(arg) for arg in args]
        call = Call(lambda: perform(self.made, self.number, method, plain, given))
        return Pending(lambda: call.result(waits.patience_s + 5), lambda: call.is_blocked(0.3))

    def leave(self) -> None:
        self.made.destroy()

    def end(self) -> None:
        self.made.destroy()
        self.group.abort()


class RemoteRank(Rank):
    """A rank that is a process."""

    def __init__(self, number: int, child: peers.Peer) -> None:
        super().__init__(number)
        self.child = child
        self._begun = 0
        self._heard: dict[int, CallOutcome] = {}

    def begin(self, method: str, *args: Any, **given: Any) -> Pending:
        plain = [carried(arg) for arg in args]
        self._begun += 1
        number = self._begun
        self.child.send((number, method, plain, given))
        kept = functools.cache(lambda: self._outcome(number, waits.patience_s + 5))
        return Pending(kept, lambda: self._is_blocked(number))

    def _outcome(self, number: int, within: float) -> CallOutcome:
        while number not in self._heard:
            self._hear(within)
        return self._heard.pop(number)

    def _is_blocked(self, number: int) -> bool:
        while number not in self._heard:
            if not self.child.poll(0.3):
                return True
            self._hear(0.0)
        return False

    def _hear(self, within: float) -> None:
        heard, plain = self.child.recv(timeout=within)
        self._heard[heard] = CallOutcome(**plain)

    def leave(self) -> None:
        self.child.kill()

    def leave_program(self, way: str) -> None:
        """Leave the process's program as law ALL-8 says, in one of the ways of :mod:`leaving`."""
        self.child.send(("leave", way))
        leaving.check_left(self.child)

    @property
    def pid(self) -> int:
        return self.child.pid


@attrs.frozen
class Ranks:
    """A group under test."""

    every: Sequence[Rank]

    def __len__(self) -> int:
        return len(self.every)

    def __getitem__(self, number: int) -> Rank:
        return self.every[number]

    def begin(self, method: str, each: Callable[[int], Sequence[Any]], **given: Any) -> list[Pending]:
        """Start the same call at every rank; ``each(rank)`` gives its arguments."""
        given.setdefault("timeout", waits.patience_s)
        return [rank.begin(method, *each(rank.number), **given) for rank in self.every]

    def outcomes(self, method: str, each: Callable[[int], Sequence[Any]], **given: Any) -> list[CallOutcome]:
        return [pending.outcome() for pending in self.begin(method, each, **given)]

    def values(self, method: str, each: Callable[[int], Sequence[Any]], **given: Any) -> list[Any]:
        """The results of all ranks' calls; fails if one raised."""
        found = self.outcomes(method, each, **given)
        failed = [str(outcome) for outcome in found if outcome.error]
        assert not failed, f"{method}: {'; '.join(failed)}"
        return [outcome.value for outcome in found]

    def refused(
        self, method: str, each: Callable[[int], Sequence[Any]], *kinds: type[KvplugError], **given: Any
    ) -> list[CallOutcome]:
        """Make a call that every rank must refuse with one of ``kinds``."""
        found = self.outcomes(method, each, **given)
        for outcome in found:
            check_raised(outcome, *kinds)
        return found


def check_raised(outcome: CallOutcome, *kinds: type[KvplugError]) -> None:
    """Assert that a call raised one of these, or a subclass."""
    wanted = " or ".join(kind.__name__ for kind in kinds)
    assert outcome.error, (
        f"{wanted} was expected at rank {outcome.rank}, and its call returned {outcome.value}"
    )
    cls = getattr(kvplug.transport, outcome.error, None) or getattr(kvplug, outcome.error, None)
    assert cls is not None and issubclass(cls, kinds), f"{wanted} was expected, and {outcome}"


class CommunicatorSuite(Contract):
    """The subject, and how its ranks are made. Authors set the class attributes."""

    kind: ClassVar[Kind] = Kind.COMMUNICATOR
    device: ClassVar[str] = "cpu"
    """The device of the tensors that are tried."""
    timeout_s: ClassVar[float] = 20.0
    """The context's ``timeout_s``: what counts where a call says nothing."""
    compares: ClassVar[bool] = True
    """Whether the ranks are judged by comparing what they are about to do; not where an end of one rank says
    that it does not, since an option decides, say."""
    _compares: ClassVar[dict[str, bool]] = {}
    """The value of ``compares`` that communicators have returned, by suite and options."""

    def make_communicator(self, context: CommunicatorContext) -> DeviceCommunicator:
        """The transport's factory, called. Override it for a transport that is not installed."""
        return self.installed("make_communicator").load_factory()(context)  # type: ignore[no-any-return]

    def made(self, group: StatelessGroup, **context: Any) -> DeviceCommunicator:
        """One rank's communicator. ``context``: fields that differ from this suite's defaults."""
        usual = {"device": self.device, "timeout_s": self.timeout_s, "credentials": Credentials()}
        options = self.made_options(**context.pop("options", {}))
        return self.make_communicator(
            CommunicatorContext(options=options, group=group, **{**usual, **context})
        )

    def ranks(self, world_size: int = WORLD, **context: Any) -> Ranks:
        """A group of ranks with communicators: threads, or processes with :attr:`ends_are_processes`."""
        return (
            self._remote_ranks(world_size, context)
            if self.ends_are_processes
            else self._local_ranks(world_size, context)
        )

    def _local_ranks(self, world_size: int, context: dict[str, Any]) -> Ranks:
        listener = StatelessGroup.listen("unix:")

        def make(number: int) -> LocalRank:
            address = listener.contact if number else listener
            group = StatelessGroup.create(
                address,
                rank=number,
                world_size=world_size,
                timeout=waits.patience_s,
                timeout_s=self.timeout_s,
            )
            self.later(group.abort)
            made = LocalRank(number, group, self.made(group, **context))
            self.later(made.end)
            return made

        calls = [Call(lambda number=number: make(number)) for number in range(world_size)]  # type: ignore[misc]
        return Ranks([call.result(2 * waits.patience_s) for call in calls])

    def _remote_ranks(self, world_size: int, context: dict[str, Any]) -> Ranks:
        target = f"{__name__}:_run_rank"
        children = [
            self.start_forked(target, self.suite_ref(), number, world_size, context, timeout_s=LIFE_S)
            for number in range(world_size)
        ]
        return self._met(children)

    def ranks_at(self, hosts: Sequence[int]) -> Ranks:
        """A group whose rank n is a process on the host ``hosts[n]``, 0 or 1."""
        target = f"{__name__}:_run_rank"
        children = [
            self.start_at(host, target, self.suite_ref(), number, len(hosts), {}, host, timeout_s=LIFE_S)
            for number, host in enumerate(hosts)
        ]
        return self._met(children)

    def _met(self, children: Sequence[peers.Peer]) -> Ranks:
        contact = children[0].recv()
        for child in children[1:]:
            child.send(contact)
        for child in children:
            assert child.recv() == "ready"
        return Ranks([RemoteRank(number, child) for number, child in enumerate(children)])

    def takes(self, rank: Rank, dtype: str, *, summing: bool = False) -> bool:
        """Whether the transport claims that dtype on the device under test."""
        return bool(rank.begin("supports", self.device, dtype, summing=summing).outcome().value)

    def warm_up(self) -> None:
        """Run one large operation: torch starts its threads then and keeps them."""
        import torch

        torch.ones(1 << 20).add_(1)

    def import_all(self) -> None:
        import torch  # noqa: F401

        super().import_all()

    @property
    def compared_calls(self) -> str:
        """The reason to skip a test, for ``needs``."""
        if self.compares and self._end_compares():
            return ""
        return f"the ranks of {self.called} do not compare what they are about to do (compares)"

    def _end_compares(self) -> bool:
        suite_ref = str(self.suite_ref())
        if suite_ref not in self._compares:
            with StatelessGroup.create("unix:", rank=0, world_size=1) as group, self.made(group) as alone:
                self._compares[suite_ref] = alone.compares
        return self._compares[suite_ref]

    @property
    def remote_and_forked_processes(self) -> str:
        """The reason to skip a test, for ``needs``."""
        return self.remote_processes or self.forked_processes

    @property
    def remote_processes(self) -> str:
        """The reason to skip a test, for ``needs``."""
        return (
            ""
            if self.ends_are_processes
            else f"the ranks of {self.called} are threads here (ends_are_processes)"
        )


def _run_rank(
    parent: peers.Parent,
    suite_ref: dict[str, Any],
    number: int,
    world_size: int,
    context: dict[str, Any],
    host: int | None = None,
) -> Any:
    """A rank's process: makes its communicator, and runs each call in a separate thread."""
    suite = suite_from_ref(suite_ref)
    there = {} if host is None else at_host(host)
    credentials = there.get("credentials")
    if number == 0:
        address: Any = StatelessGroup.listen(f"{there['host']}:0" if there else "unix:", credentials)
        parent.send(address.contact)
    else:
        address = parent.recv()
    group = StatelessGroup.create(
        address,
        rank=number,
        world_size=world_size,
        credentials=credentials,
        timeout=20.0,
        timeout_s=suite.timeout_s,
    )
    made = suite.made(group, **there, **context)
    parent.send("ready")

    def call(at: int, method: str, args: list[Any], given: dict[str, Any]) -> None:
        parent.send((at, attrs.asdict(perform(made, number, method, args, given), recurse=False)))

    while True:
        match parent.recv(timeout=None):
            case ("leave", str(way)):
                leaving.leave(parent, way, abort=made.destroy, close=made.destroy)
            case asked:
                threading.Thread(target=call, args=asked, daemon=True).start()
