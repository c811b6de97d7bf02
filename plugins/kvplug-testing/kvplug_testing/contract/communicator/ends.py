"""The ranks of a group of two, for the general laws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar

from kvplug import StatelessGroup, TransportError
from kvplug.transport import DeviceCommunicator, RecvOp, SendOp
from kvplug_testing import peers, waits
from kvplug_testing.comparison import assert_answer
from kvplug_testing.contract.communicator.tensors import tensor_of, tokens
from kvplug_testing.contract.ends import Calls, End, Ends, fields_of, given
from kvplug_testing.waits import Call

if TYPE_CHECKING:
    from kvplug_testing.contract.communicator.suite import CommunicatorSuite

_SHAPE = (512, 512)
"""1 MiB of float32."""


class RankEnd(End):
    """One of two ranks. Its ``destroy`` is its ``close`` and its ``abort``."""

    gone_later = TransportError

    def __init__(self, number: int, group: StatelessGroup, made: DeviceCommunicator) -> None:
        self.role = f"rank {number}"
        self.awaits = f"rank {1 - number}"
        self.thing = made
        self._number = number
        self._group = group
        self._made = made
        # Made here: torch may hang in a forked child.
        self._three = tensor_of("float32", (3,), number).to(made.device)

    def calls(self) -> Calls:
        import torch

        made, other, three = self._made, 1 - self._number, self._three
        names = ("all_reduce", "all_gather", "all_gatherv", "reduce_scatter", "reduce_scatterv", "gather")
        found: dict[str, Any] = {
            name: _with_timeout(getattr(made, name), three) for name in (*names, "broadcast")
        }
        return found | {
            "send": _with_timeout(made.send, three, other),
            "recv": _with_timeout(made.recv, (3,), torch.float32, other),
            "batch_isend_irecv": _with_timeout(made.batch_isend_irecv, []),
            "dispatch": _with_timeout(made.dispatch, three, three, three),
            "combine": _with_timeout(made.combine, three),
            "synchronize": _with_timeout(made.synchronize),
            "suspend": lambda *timeout: made.suspend(),
            "resume": lambda *timeout: made.resume(),
        }

    def blocking(self) -> Calls:
        """If ranks do not compare their calls first, other calls may end before the other rank calls."""
        calls = self.calls()
        return {name: calls[name] for name in ("all_reduce", "all_gather", "recv")}

    def idles(self) -> str:
        """The law asks it of pipes and queues."""
        return ""

    def timed(self) -> Calls:
        return self.blocking()

    def part(self, number: int, timeout: float | None) -> None:
        import torch

        made, rank = self._made, self._number
        parts = _parts(number % 11)
        mine = parts[rank].to(made.device)
        summed = made.all_reduce(mine.clone(), timeout=timeout)
        gathered = made.all_gather(mine, 0, timeout=timeout)
        if rank == number % 2:
            made.send(mine, 1 - rank, timeout=timeout)
            received = parts[1 - rank]
        else:
            received = made.recv(_SHAPE, mine.dtype, 1 - rank, timeout=timeout).cpu()
        assert_answer(parts[0] + parts[1], summed.cpu(), f"the sum of exchange {number}")
        assert_answer(torch.cat(parts), gathered.cpu(), f"what exchange {number} gathered")
        assert_answer(parts[1 - rank], received, f"what came in exchange {number}")

    def lied_to(self) -> Calls:
        made, three = self._made, self._three
        hidden, weights, ids = (each.to(made.device) for each in tokens(2 + self._number, self._number))

        def layer(timeout: float | None) -> None:
            dispatched = made.dispatch(hidden, weights, ids, False, timeout=timeout)[0]
            assert dispatched.shape[1:] == hidden.shape[1:], f"tokens came as {dispatched.shape}"
            combined = made.combine(dispatched, False, timeout=timeout)
            assert combined.shape == hidden.shape, f"tokens came back as {combined.shape}"

        return {"broadcast": _with_timeout(made.broadcast, three), "dispatch and combine": layer}

    def busy(self, leaves: bool) -> None:
        while True:
            self._made.all_reduce(self._three, timeout=None)

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
        found = getattr(self if method == "batch" else self._made, method)
        value = found(*there, **given) if callable(found) else found
        first = next((arg for arg in there if isinstance(arg, torch.Tensor)), None)
        return [_plain(value), _plain(first), value is first]

    def batch(self, sends: Sequence[Any], recvs: Sequence[Any], **given: Any) -> list[Any]:
        """``batch_isend_irecv`` of pairs of a tensor and a rank. Returns the tensors received into."""
        ops: list[Any] = [*(SendOp(*each) for each in sends), *(RecvOp(*each) for each in recvs)]
        self._made.batch_isend_irecv(ops, **given)
        return [tensor for tensor, _ in recvs]

    def _formed(self, arg: Any, form: str) -> Any:
        import torch

        if type(arg) is list:
            return [self._formed(each, form) for each in arg]
        if not isinstance(arg, torch.Tensor):
            return arg
        here = arg.clone().to("meta" if form == "meta" else self._made.device)
        if form != "strided":
            return here
        wide = torch.empty((*here.shape, 2), dtype=here.dtype, device=here.device)
        wide[..., 0] = here
        return wide[..., 0]

    def close(self, timeout: float | None) -> None:
        self._made.destroy()

    def abort(self) -> None:
        self._made.destroy()

    def closed(self) -> bool:
        return self._made.destroyed


class CommunicatorEnds(Ends):
    """A group. ``context``: fields of the communicators, ``world_size``, and the host of a child."""

    roles: ClassVar[Sequence[str]] = ("rank 0", "rank 1")
    breaks_by_timeout = True
    suite: CommunicatorSuite

    def make(self, children: Sequence[peers.Peer | None], context: Mapping[str, Any]) -> list[End | None]:
        if children[0] is not None:
            address: Any = None
            contact = children[0].recv()
        else:
            address = StatelessGroup.listen("unix:")
            contact = address.contact
        for child in children[1:]:
            if child is not None:
                child.send(contact)
        joining = [
            None if child else Call(partial(self._join, contact if rank else address, rank, context))
            for rank, child in enumerate(children)
        ]
        return [
            None if call is None else self._end(rank, *call.result(2 * waits.patience_s))
            for rank, call in enumerate(joining)
        ]

    def join(self, parent: peers.Parent, role: int, context: Mapping[str, Any]) -> End:
        there = fields_of(context)
        if role:
            address: Any = parent.recv(None)
        else:
            where = f"{there['host']}:0" if "host" in there else "unix:"
            address = StatelessGroup.listen(where, there.get("credentials"))
            parent.send(address.contact)
        return self._end(role, *self._join(address, role, context))

    def _join(
        self, address: Any, rank: int, context: Mapping[str, Any]
    ) -> tuple[StatelessGroup, DeviceCommunicator]:
        fields = fields_of(context)
        group = StatelessGroup.create(
            address,
            rank=rank,
            world_size=fields.pop("world_size", len(self.roles)),
            credentials=fields.get("credentials"),
            timeout=waits.patience_s,
            timeout_s=self.suite.timeout_s,
        )
        fields.pop("heartbeat_timeout_s", None)
        try:
            return group, self.suite.made(group, **fields)
        except BaseException:
            group.abort()
            raise

    def _end(self, rank: int, group: StatelessGroup, made: DeviceCommunicator) -> End:
        self.suite.later(group.abort)
        self.suite.later(made.destroy)
        return RankEnd(rank, group, made)


def _plain(value: Any) -> Any:
    """A result in the form in which it is sent to another process."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().cpu().contiguous()
    return type(value)(map(_plain, value)) if isinstance(value, (list, tuple)) else value


@lru_cache(maxsize=2)
def _parts(number: int) -> list[Any]:
    """Each rank's tensor in such an exchange, kept: tests that measure memory see what is judged."""
    return [tensor_of("float32", _SHAPE, number + rank) for rank in range(2)]


def _with_timeout(call: Any, *args: Any) -> Any:
    """The call, with a timeout as its only argument, if there is one."""
    return lambda *timeout: call(*args, **given(timeout))
