"""A rank that has proved its identity and lies (law ALL-10), to the other one of a group of two.

The group's messages pass the relay, and so do connections whose contacts the ranks exchange through it. What
the transport's own library sends over connections of its own is not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Final

import attrs

from kvplug import KvplugError, StatelessGroup
from kvplug.transport import DEFAULT_TIMEOUT, Timeout
from kvplug_testing import peers, waits
from kvplug_testing.contract.communicator.moe import tokens
from kvplug_testing.contract.communicator.suite import CommunicatorSuite
from kvplug_testing.contract.lied_to import DIALS, LISTENS, LiedTo, be_lied_to
from kvplug_testing.contract.suite_ref import suite_from_ref
from kvplug_testing.tampering.conversing import Conversing
from kvplug_testing.tampering.relay import Relay
from kvplug_testing.tampering.victim import SLACK_S, Ended, ended
from kvplug_testing.waits import Call

_RANKS: Final = {LISTENS: 0, DIALS: 1}
"""The victim's rank, by what it does in the group."""


class LyingPeers(CommunicatorSuite, LiedTo):
    """What one rank may say to another."""

    lies = 15
    _victim = f"{__name__}:run_victim"

    def _contact(self) -> str:
        listener = StatelessGroup.listen("unix:")
        try:
            return listener.contact
        finally:
            listener.close()

    def _conversations(self, relay: Relay, role: str, child: peers.Peer) -> Conversing:
        return _Conversing(self, relay, role, child)


def _relayed(relay: Relay) -> type[StatelessGroup]:
    """The class of a group in whose messages contacts are the relay's."""

    class RelayedGroup(StatelessGroup):
        def send(self, value: object, dst: int) -> None:
            super().send(relay.through_plain(value), dst)

        def recv(self, src: int, timeout: Timeout = DEFAULT_TIMEOUT) -> Any:
            return relay.through_plain(super().recv(src, timeout))

        def all_gather(self, value: object, timeout: Timeout = DEFAULT_TIMEOUT) -> list[Any]:
            gathered = super().all_gather(relay.through_plain(value), timeout)
            return [
                each if rank == self.rank else relay.through_plain(each) for rank, each in enumerate(gathered)
            ]

        def broadcast(self, value: object, src: int, timeout: Timeout = DEFAULT_TIMEOUT) -> Any:
            return relay.through_plain(super().broadcast(relay.through_plain(value), src, timeout))

    return RelayedGroup


class _Conversing(Conversing):
    """A group each: its two ranks make the same calls."""

    def __init__(self, suite: LyingPeers, relay: Relay, role: str, child: peers.Peer) -> None:
        super().__init__(relay, child)
        self._suite = suite
        self._rank = 1 - _RANKS[role]
        self._made: Any = None
        self._ends: list[Callable[[], Any]] = []
        suite.later(self._hang_up)

    def _begin(self, join_s: float) -> None:
        self.relay.leave()
        if self._rank:
            self._child.send(["join", join_s])
            address: Any = self.relay.through(self._answer())
        else:
            address = StatelessGroup.listen("unix:")
            self._child.send(["join", join_s, self.relay.through(address.contact)])
        joining = Call(partial(self._join, address, join_s))
        self._answer()
        joining.end(join_s + SLACK_S)

    def _join(self, address: Any, join_s: float) -> None:
        self._made = None
        with suppress(KvplugError):
            group = _relayed(self.relay).create(
                address, rank=self._rank, world_size=2, timeout=join_s, timeout_s=join_s
            )
            self._ends.append(group.abort)
            self._made = self._suite.made(group, timeout_s=join_s, **_CONTEXT)
            self._ends.append(self._made.destroy)

    def _go_on(self, call_s: float) -> Any:
        working = Call(partial(_call_all, self._made, self._rank))
        self._child.send(["go on", call_s])
        answer = self._answer()
        self._hang_up()
        working.end()
        return answer

    def _hang_up(self) -> None:
        while self._ends:
            Call(self._ends.pop()).end()

    def _wanted(self) -> list[Any]:
        return []


_CONTEXT: Final = {"unique_name": "ep:0", "data_parallel_size": 2, "all2all_backend": "naive"}


def _calls(made: Any, rank: int) -> Iterator[tuple[str, Callable[[float], Any]]]:
    """The calls of one of two ranks, by their names."""
    import torch

    tensor = torch.arange(12, dtype=torch.float32, device=made.device).view(3, 4) + rank
    given = [each.to(made.device) for each in tokens(2 + rank, rank)]

    def pair(s: float) -> None:
        for sender in (0, 1):
            if sender == rank:
                made.send(tensor, 1 - rank, timeout=s)
            else:
                _shaped(made.recv((3, 4), torch.float32, sender, timeout=s), [3, 4])

    def layer(s: float) -> None:
        hidden = made.dispatch(*given, False, timeout=s)[0]
        _shaped(hidden, [len(hidden), *given[0].shape[1:]])
        _shaped(made.combine(hidden, False, timeout=s), [*given[0].shape])

    yield "all_reduce", lambda s: _shaped(made.all_reduce(tensor.clone(), timeout=s), [3, 4])
    yield "all_gather", lambda s: _shaped(made.all_gather(tensor, timeout=s), [3, 8])
    yield "broadcast", lambda s: _shaped(made.broadcast(tensor.clone(), 0, timeout=s), [3, 4])
    yield "send and recv", pair
    yield "dispatch and combine", layer


def _call_all(made: Any, rank: int) -> None:
    with suppress(KvplugError):
        for _, call in _calls(made, rank) if made is not None else ():
            call(waits.patience_s)


def _shaped(tensor: Any, shape: list[int]) -> None:
    """Raises AssertionError: the result has another shape than was asked for."""
    assert [*tensor.shape] == shape, f"a tensor of {[*tensor.shape]} was returned, not {shape}"


# -- the victim's process ------------------------------------------------------------------------------


def run_victim(parent: peers.Parent, suite_ref: dict[str, Any], role: str) -> str:
    """In a child process: join a group and make the calls, as often as the parent wants."""
    suite: Any = suite_from_ref(suite_ref)
    take_part = partial(_take_part, parent, suite, _RANKS[role])
    return be_lied_to(parent, suite, take_part, bounded=suite.device == "cpu")


def _take_part(
    parent: peers.Parent, suite: Any, rank: int, join_s: float, contact: str | None = None
) -> list[Ended]:
    address: Any = contact
    if address is None:
        address = StatelessGroup.listen("unix:")
        parent.send(address.contact)
    create = partial(
        StatelessGroup.create, address, rank=rank, world_size=2, timeout=join_s, timeout_s=join_s
    )
    calls: list[Ended] = []

    def call(name: str, within: float, run: Callable[[], Any]) -> Any:
        how = ended(name, within, run)
        calls.append(attrs.evolve(how, value=None))
        return how.value

    group = call("StatelessGroup.create", join_s, create)
    made = None
    if group is not None:
        make = partial(suite.made, group, timeout_s=join_s, **_CONTEXT)
        made = call("the factory", join_s, make)
    parent.send("joined, or not")
    call_s = parent.recv(None)[1]
    if made is not None:
        for name, run in _calls(made, rank):
            call(name, call_s, partial(run, call_s))
            if calls[-1].error:
                break
        call("destroy", call_s, made.destroy)
    if group is not None:
        call("close of the group", call_s, partial(group.close, call_s))
    return calls
