"""The ranks of a group of two, for the general laws."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from kvplug import StatelessGroup, TransportError
from kvplug.transport import DeviceCommunicator, NamedExhaustion
from kvplug_testing import waits
from kvplug_testing.comparison import assert_answer
from kvplug_testing.contract.communicator.tensors import tensor_of, tokens
from kvplug_testing.contract.ends import Calls, End, Ends, fields_of
from kvplug_testing.groups import local_groups

if TYPE_CHECKING:
    from kvplug_testing.contract.communicator.suite import CommunicatorSuite

_SHAPE = (512, 512)
"""1 MiB of float32."""


@attrs.frozen(eq=False)
class Content:
    """What a rank sends in an exchange, and what it must receive."""

    mine: Any
    summed: Any
    """Memory for the sum."""
    sends: bool
    """Whether it sends to the other one, or receives."""
    right: list[Any]


class RankEnd(End):
    """One of two ranks. Its ``destroy`` is its ``close`` and its ``abort``."""

    gone_later = TransportError
    one_thread = ("all_reduce",)

    def __init__(self, number: int, group: StatelessGroup, made: DeviceCommunicator) -> None:
        self.role = f"rank {number}"
        self.awaits = f"rank {1 - number}"
        self.thing = made
        self._number = number
        self._group = group
        # Made here: torch may hang in a forked child.
        self._three = tensor_of("float32", (3,), number).to(made.device)

    def calls(self) -> Calls:
        import torch

        made, other, three = self.thing, 1 - self._number, self._three
        names = ("all_reduce", "all_gather", "all_gatherv", "reduce_scatter", "reduce_scatterv", "gather")
        return {
            **{name: partial(getattr(made, name), three) for name in (*names, "broadcast", "combine")},
            "send": partial(made.send, three, other),
            "recv": partial(made.recv, (3,), torch.float32, other),
            "batch_isend_irecv": partial(made.batch_isend_irecv, []),
            "dispatch": partial(made.dispatch, three, three, three),
            "synchronize": made.synchronize,
        }

    def untimed(self) -> dict[str, Any]:
        return {"suspend": self.thing.suspend, "resume": self.thing.resume}

    def blocking(self) -> Calls:
        """If ranks do not compare their calls first, other calls may end before the other rank calls."""
        calls = self.calls()
        return {name: calls[name] for name in ("all_reduce", "all_gather", "recv")}

    def idles(self) -> str:
        """The law asks it of pipes and queues."""
        return ""

    def timed(self) -> Calls:
        return self.blocking()

    def exchange(self, content: Content, timeout: float | None) -> list[Any]:
        made, mine, other = self.thing, content.mine, 1 - self._number
        content.summed.copy_(mine)
        summed = made.all_reduce(content.summed, timeout=timeout)
        received = [summed, made.all_gather(mine, 0, timeout=timeout)]
        if content.sends:
            made.send(mine, other, timeout=timeout)
        else:
            received.append(made.recv(_SHAPE, mine.dtype, other, timeout=timeout))
        return received

    def check(self, content: Content, received: Sequence[Any]) -> None:
        for got, right in zip(received, content.right, strict=False):
            assert_answer(right, got.cpu(), f"what {self.role} received")

    def lied_to(self) -> Calls:
        made = self.thing
        hidden, weights, ids = (each.to(made.device) for each in tokens(2 + self._number, self._number))

        def layer(timeout: float | None) -> None:
            dispatched = made.dispatch(hidden, weights, ids, False, timeout=timeout)[0]
            assert dispatched.shape[1:] == hidden.shape[1:], f"tokens came as {dispatched.shape}"
            combined = made.combine(dispatched, False, timeout=timeout)
            assert combined.shape == hidden.shape, f"tokens came back as {combined.shape}"

        return {"broadcast": self.calls()["broadcast"], "dispatch and combine": layer}

    def busy(self, leaves: bool) -> None:
        while True:
            self.thing.all_reduce(self._three, timeout=None)

    def end(self, how: str) -> None:
        """The group ends, too: what is made for a communicator alone is of no use after it."""
        super().end(how)
        self._group.abort()

    def perform(self, method: str, args: list[Any], form: str, given: dict[str, Any]) -> list[Any]:
        """Call any method, or :meth:`batch`, or get an attribute.

        Returns the result, the first tensor argument as it is now, and whether these are the same object.
        ``form`` of tensor arguments: "strided" are not contiguous, "meta" are on that device.
        """
        import torch

        there = [self._formed(arg, form) for arg in args]
        found = getattr(self if method == "batch" else self.thing, method)
        value = found(*there, **given) if callable(found) else found
        first = next((arg for arg in there if isinstance(arg, torch.Tensor)), None)
        return [_plain(value), _plain(first), value is first]

    def batch(self, sends: Sequence[Any], recvs: Sequence[Any], **given: Any) -> list[Any]:
        """``batch_isend_irecv`` of pairs of a tensor and a rank. Returns the tensors received into."""
        ops: list[Any] = [
            *(DeviceCommunicator.SendOp(*each) for each in sends),
            *(DeviceCommunicator.RecvOp(*each) for each in recvs),
        ]
        self.thing.batch_isend_irecv(ops, **given)
        return [tensor for tensor, _ in recvs]

    def _formed(self, arg: Any, form: str) -> Any:
        import torch

        if type(arg) is list:
            return [self._formed(each, form) for each in arg]
        if not isinstance(arg, torch.Tensor):
            return arg
        here = arg.clone().to("meta" if form == "meta" else self.thing.device)
        if form != "strided":
            return here
        wide = torch.empty((*here.shape, 2), dtype=here.dtype, device=here.device)
        wide[..., 0] = here
        return wide[..., 0]

    def close(self, timeout: float | None) -> None:
        self.thing.destroy()

    def abort(self) -> None:
        self.thing.destroy()

    def closed(self) -> bool:
        return bool(self.thing.destroyed)


class CommunicatorEnds(Ends):
    """A group. ``context``: fields of the communicators, ``world_size``, and the host of a child."""

    roles: ClassVar[Sequence[str]] = ("rank 0", "rank 1")
    breaks_by_timeout = True
    keeps_offer = False  # a group is for one communicator
    unlimited = 3
    suite: CommunicatorSuite

    def offer(self) -> Any:
        """Where all ranks are in this process their groups are made first, so that they are not judged."""
        fields = fields_of(self.context)
        if self.is_local:
            make = self.suite._stack.enter_context(local_groups(waits.patience_s))
            self._groups = make(fields.get("world_size", len(self.roles)))
            return None
        where = f"{fields['host']}:0" if "host" in fields else "unix:"
        self._address = StatelessGroup.listen(where, fields.get("credentials"))
        return self._address.contact

    def accept(self) -> End:
        return self.connect(0, None if self.is_local else self._address)

    def connect(self, role: int, contact: Any) -> End:
        fields = fields_of(self.context)
        world_size = fields.pop("world_size", len(self.roles))
        fields.pop("heartbeat_timeout_s", None)
        fields.setdefault("timeout_s", min(self.timeout_s, self.suite.timeout_s))
        if self.is_local:
            group = self._groups[role]
        else:
            credentials, timeout = fields.get("credentials"), self.timeout_s
            group = StatelessGroup.create(
                contact, rank=role, world_size=world_size, credentials=credentials, timeout=timeout
            )
            self.suite.later(group.abort)
        with NamedExhaustion("building a device communicator"):  # as kvplug's own builder does
            made = self.suite.made(group, **fields)
        self.suite.later(made.destroy)
        return RankEnd(role, group, made)

    def content(self, role: int, number: int) -> Content:
        import torch

        number %= 11
        parts = [tensor_of("float32", _SHAPE, number + rank).to(self.suite.device) for rank in range(2)]
        right = [each.cpu() for each in (sum(parts), torch.cat(parts), parts[1 - role])]
        return Content(parts[role], torch.empty_like(parts[role]), role == number % 2, right)


def _plain(value: Any) -> Any:
    """A result in the form in which it is sent to another process."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().cpu().contiguous()
    return type(value)(map(_plain, value)) if isinstance(value, (list, tuple)) else value
