"""The base of the communicator suite: ranks, as threads or as processes, that execute calls.

A test describes each rank's calls in plain values, so that a rank may be a thread or a process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs

import kvplug
import kvplug.transport
from kvplug import KvplugError, StatelessGroup
from kvplug.transport import CommunicatorContext, Credentials, DeviceCommunicator, Kind
from kvplug_testing import peers, waits
from kvplug_testing.contract import ends
from kvplug_testing.contract.communicator.calls import CallOutcome, carried
from kvplug_testing.contract.communicator.ends import CommunicatorEnds
from kvplug_testing.contract.communicator.tensors import WORLD
from kvplug_testing.contract.ends import RUN_END, Handle, LocalHandle, RemoteHandle
from kvplug_testing.contract.general import General

LIFE_S = 300.0
"""The time limit of a rank's process: longer than any test. The process ends with its test."""


class Rank:
    """One rank of a group under test, in this process or in one of its own."""

    def __init__(self, number: int, handle: Handle) -> None:
        self.number = number
        self._handle = handle

    def begin(self, method: str, *args: Any, **given: Any) -> Pending:
        """Start the call without waiting for it."""
        return Pending(self._handle.begin("perform", method, [carried(arg) for arg in args], given))

    def call(self, method: str, *args: Any, **given: Any) -> CallOutcome:
        """Make the call, and wait until it ends."""
        return self.begin(method, *args, **given).outcome()

    def leave(self) -> None:
        """End without telling the other ranks; a process is killed."""
        if isinstance(self._handle, RemoteHandle):
            self.child.kill()
        else:
            self.made.destroy()

    @property
    def made(self) -> DeviceCommunicator:
        """The communicator, in this process."""
        assert isinstance(self._handle, LocalHandle)
        return self._handle.end.thing  # type: ignore[no-any-return]

    @property
    def child(self) -> peers.Peer:
        """The process."""
        assert isinstance(self._handle, RemoteHandle)
        return self._handle.child


class Pending:
    """A started call of a rank."""

    def __init__(self, call: ends.Pending) -> None:
        self._call = call

    def outcome(self) -> CallOutcome:
        """Waits until the call ends."""
        return CallOutcome(**self._call.result(waits.patience_s + 5))

    def check_blocked(self, why: str = "") -> None:
        """Assert that it is still blocked after a short time."""
        assert self._call.is_blocked(0.3), f"it did not wait{why}: {self.outcome()}"


Args = Sequence[Sequence[Any]] | Mapping[int, Sequence[Any]]


@attrs.frozen
class Ranks:
    """A group under test."""

    every: Sequence[Rank]

    def __len__(self) -> int:
        return len(self.every)

    def __getitem__(self, number: int) -> Rank:
        return self.every[number]

    def begin(self, method: str, args: Args, **given: Any) -> list[Pending]:
        """Start the same call at every rank, or with a dict at these ranks; ``args``: its arguments there."""
        given.setdefault("timeout", waits.patience_s)
        at = args if isinstance(args, Mapping) else dict(zip(range(len(self)), args, strict=True))
        return [self[rank].begin(method, *each, **given) for rank, each in at.items()]

    def outcomes(self, method: str, args: Args, **given: Any) -> list[CallOutcome]:
        return [pending.outcome() for pending in self.begin(method, args, **given)]

    def values(self, method: str, args: Args, **given: Any) -> list[Any]:
        """The results of all ranks' calls; fails if one raised."""
        found = self.outcomes(method, args, **given)
        failed = [str(outcome) for outcome in found if outcome.error]
        assert not failed, f"{method}: {'; '.join(failed)}"
        return [outcome.value for outcome in found]

    def raised(self, method: str, args: Args, *kinds: type[KvplugError], **given: Any) -> list[CallOutcome]:
        """Make a call that must raise one of ``kinds`` at every rank that makes it."""
        found = self.outcomes(method, args, **given)
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


class CommunicatorSuite(General):
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

    def ends(self) -> CommunicatorEnds:
        return CommunicatorEnds(self)

    def ranks(self, world_size: int = WORLD, **context: Any) -> Ranks:
        """A group of ranks with communicators: threads, or processes with :attr:`ends_are_processes`."""
        are_remote = [self.ends_are_processes] * world_size
        found = self._joined(are_remote, {"world_size": world_size, **context})
        return Ranks([Rank(number, handle) for number, handle in enumerate(found)])

    def ranks_at(self, hosts: Sequence[int]) -> Ranks:
        """A group whose rank n is a process on the host ``hosts[n]``, 0 or 1."""
        context = {"world_size": len(hosts)}
        children = [
            self.start_at(
                host, RUN_END, self.suite_ref(), number, {**context, "at_host": host}, timeout_s=LIFE_S
            )
            for number, host in enumerate(hosts)
        ]
        return Ranks([Rank(number, handle) for number, handle in enumerate(self._met(children, context))])

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
    def remote_processes(self) -> str:
        """The reason to skip a test, for ``needs``."""
        return (
            ""
            if self.ends_are_processes
            else f"the ranks of {self.called} are threads here (ends_are_processes)"
        )
