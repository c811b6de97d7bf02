"""The base of the communicator suite: ranks, as threads or as processes, that execute calls.

A test describes each rank's calls in plain values, so that a rank may be a thread or a process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import attrs

from kvplug import StatelessGroup
from kvplug.kit import Kind
from kvplug.transport import Credentials, DeviceCommunicator
from kvplug_testing.contract.communicator.ends import CommunicatorEnds
from kvplug_testing.contract.communicator.tensors import WORLD
from kvplug_testing.contract.ends import Handle, Outcome, Pending
from kvplug_testing.contract.general import General

Args = Sequence[Sequence[Any]] | Mapping[int, Sequence[Any]]


@attrs.frozen
class Ranks:
    """A group under test. ``args`` are the arguments of a call at every rank, or with a dict at these."""

    every: Sequence[Handle]

    def begin(self, method: str, args: Args, form: str = "", **given: Any) -> dict[int, Pending]:
        """Start the same call at these ranks. ``form``: see :meth:`.RankEnd.perform`."""
        at = args if isinstance(args, Mapping) else dict(zip(range(len(self.every)), args, strict=True))
        return {
            rank: self.every[rank].begin("perform", method, list(each), form, given)
            for rank, each in at.items()
        }

    def outcomes(self, method: str, args: Args, form: str = "", **given: Any) -> list[Outcome]:
        begun = self.begin(method, args, form, **given)
        return [pending.outcome() for pending in begun.values()]

    def results(self, method: str, args: Args, form: str = "") -> list[Any]:
        """Of each call what :meth:`.RankEnd.perform` returns."""
        return [outcome.result() for outcome in self.outcomes(method, args, form)]

    def values(self, method: str, args: Args) -> list[Any]:
        """The results of the calls."""
        return [value for value, *_ in self.results(method, args)]

    def call(self, rank: int, method: str, *args: Any, **given: Any) -> Any:
        """The result of a call of one rank."""
        return self.outcomes(method, {rank: args}, **given)[0].result()[0]

    def raised(
        self, method: str, args: Args, *kinds: type[Exception], form: str = "", **given: Any
    ) -> list[Outcome]:
        """Make a call that must raise one of ``kinds`` at every rank that makes it."""
        return [each.raised(method, *kinds) for each in self.outcomes(method, args, form, **given)]


class CommunicatorSuite(General):
    """The subject, and how its ranks are made. Authors set the class attributes."""

    kind: ClassVar[Kind] = Kind.COMMUNICATOR
    device: ClassVar[str] = "cpu"
    """The device of the tensors that are tried."""
    timeout_s: ClassVar[float] = 20.0
    """The context's ``timeout_s``: the timeout of a call that gives none."""
    lies = 30
    _lied_to_context: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"unique_name": "ep:0", "data_parallel_size": 2}
    )

    def make_communicator(self, context: DeviceCommunicator.Context) -> DeviceCommunicator:
        """The transport's factory, called. Override it for a transport that is not installed."""
        return self.installed("make_communicator").load_factory()(context)  # type: ignore[no-any-return]

    def made(self, group: StatelessGroup, **context: Any) -> DeviceCommunicator:
        """One rank's communicator. ``context``: fields that differ from this suite's defaults."""
        usual = {"device": self.device, "timeout_s": self.timeout_s, "credentials": Credentials()}
        options = self.made_options(**context.pop("options", {}))
        return self.make_communicator(
            DeviceCommunicator.Context(options=options, group=group, **{**usual, **context})
        )

    def ends(self, **context: Any) -> CommunicatorEnds:
        return CommunicatorEnds(self, context)

    def ranks(self, world_size: int = WORLD, **context: Any) -> Ranks:
        """A group of ranks with communicators: threads, or processes with :attr:`ends_are_processes`."""
        are_remote = [self.ends_are_processes] * world_size
        return Ranks(self._joined(are_remote, {"world_size": world_size, **context}))

    @property
    def _is_bounded(self) -> bool:
        return self.device == "cpu"

    @property
    def compared_calls(self) -> str:
        """The reason to skip a test, for ``needs``."""
        with StatelessGroup.create("unix:", rank=0, world_size=1) as group, self.made(group) as alone:
            if alone.compares:
                return ""
        return f"the ranks of {self.called} do not compare their calls first"
