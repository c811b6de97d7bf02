"""The communicator "pynccl": collectives over NCCL, and side channels on which the ranks watch each other."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import attrs

from kvplug import ClosedError, KvplugError, UnsupportedError, connect_ranks
from kvplug.net.wire import decode, encode, to_plain
from kvplug.transport import Deadline, DeviceCommunicator, Mesh
from kvplug_pynccl.communicator.bootstrap import RankHello, agree, explain_invalid_usage
from kvplug_pynccl.communicator.inflight import Call, Inflight
from kvplug_pynccl.communicator.side_channel import SideChannelEndpoint
from kvplug_pynccl.device import CudaDevice, Device
from kvplug_pynccl.interface import bind_to
from kvplug_pynccl.monitored import MonitoredCommunicator
from kvplug_pynccl.nccl.abi import DataType, RedOp
from kvplug_pynccl.nccl.dtypes import moved_as, reduced_as
from kvplug_pynccl.nccl.library import load
from kvplug_pynccl.nccl.prototypes import OPTIONAL
from kvplug_pynccl.options import PyncclCommunicatorOptions

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_SUSPEND: Final = "ncclCommSuspend"


@attrs.frozen
class _Part:
    """A contiguous tensor: its address, and how many elements of which type."""

    address: int
    count: int
    dtype: DataType

    @classmethod
    def of(cls, tensor: Tensor) -> _Part:
        """Describe a tensor that is moved: as bytes, if NCCL lacks its type."""
        carried = moved_as(tensor.dtype)
        return cls(tensor.data_ptr(), tensor.numel() * carried.per_element, carried.dtype)

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.nbytes


def _are_contiguous(parts: Sequence[_Part]) -> bool:
    """Whether they have one size and follow one another in memory, in this order."""
    first = parts[0]
    return all(
        part.count == first.count and part.address == first.address + number * first.nbytes
        for number, part in enumerate(parts)
    )


class PyncclCommunicator(DeviceCommunicator):
    """The factory of the spec. All ranks make theirs together, and meet through the group.

    NCCL is bound to the interface of the context's host. A ``device_group`` that the context has is kept, and
    not used: this communicator has an ``ncclComm`` of its own. One rank alone has none.
    """

    devices = frozenset({"cuda"})
    sums = (DeviceCommunicator.sums - {"int16"}) | {"uint32", "uint64"}
    moves = DeviceCommunicator.moves | {"uint16", "uint32", "uint64"}

    def __init__(self, context: DeviceCommunicator.Context, device: Device | None = None) -> None:
        """``device``: another one than the GPU that the context names, for tests.

        Raises:
            ConfigError: the device is not a GPU of this machine; no interface has the host's address; the
                ranks do not agree on an option or on the world size.
            NcclLibraryError: no NCCL can be used.
            NcclInvalidUsageError: ranks have the same GPU; the message names them. The other ranks
                raise TransportError with that message.
            TimeoutError, PeerGoneError: a rank did not come, or is gone; the message names it.
            TransportError: NCCL failed, here or at another rank, and why.
        """
        options = context.options if context.options is not None else PyncclCommunicatorOptions()
        self._gpu = CudaDevice(context.device) if device is None else device
        self._inflight: Inflight | None = None
        super().__init__(attrs.evolve(context, device=self._gpu.name))
        self.compares = options.check_order
        if self.world_size == 1:
            return
        deadline = Deadline.after(context.timeout_s)
        try:
            # First, so that a rank that fails at a later step can send the others its reason.
            self._mesh = Mesh(
                connect_ranks(context.group, SideChannelEndpoint(context), timeout=deadline.remaining())
            )
            bind_to(context.host)
            self._nccl = load(options.library)
            self._start(deadline, options.run_ahead)
        except BaseException as e:
            self._mesh.give_up(e)
            self.destroy()
            raise

    def _start(self, deadline: Deadline, run_ahead: int) -> None:
        hello = RankHello.of(self.rank_in_group, self._nccl, self._gpu, check_order=self.compares)
        ours = encode(to_plain(hello))
        found = {self.rank_in_group: ours, **self._mesh.compare(dict.fromkeys(self._others, ours), deadline)}
        unique_id, hellos = agree([decode(found[rank]) for rank in sorted(found)])
        comm = MonitoredCommunicator(
            self._nccl,
            unique_id,
            self.world_size,
            self.rank_in_group,
            what=f"NCCL of {self!r}",
            current=self._gpu.current,
        )
        try:
            self._inflight = Inflight(comm, self._mesh, self._gpu, run_ahead)
        except BaseException:
            comm.abort()
            raise
        self._inflight.wait_until_settled(
            deadline,
            "NCCL did not start in time, though all ranks are there",
            lambda error: explain_invalid_usage(error, hellos),
        )
        self._mesh.compare(dict.fromkeys(self._others, b"ready"), deadline)

    # -- collectives -----------------------------------------------------------------------------

    def _all_reduce(self, tensor: Tensor, deadline: Deadline) -> None:
        at, count, kind = tensor.data_ptr(), tensor.numel(), self._summed_as(tensor)
        call = functools.partial(self._nccl.all_reduce, at, at, count, kind, RedOp.SUM)
        self._run("all_reduce", [call], [tensor], deadline)

    def _all_gather(self, outputs: list[Tensor], tensor: Tensor, deadline: Deadline) -> None:
        given, parts = _Part.of(tensor), [_Part.of(output) for output in outputs]
        calls: list[Call]
        if _are_contiguous(parts):
            calls = [
                functools.partial(
                    self._nccl.all_gather, given.address, parts[0].address, given.count, given.dtype
                )
            ]
        else:  # unequal parts: a broadcast for each
            calls = [
                functools.partial(
                    self._nccl.broadcast,
                    given.address if root == self.rank_in_group else part.address,
                    part.address,
                    part.count,
                    part.dtype,
                    root,
                )
                for root, part in enumerate(parts)
                if part.count
            ]
        self._run("all_gather", calls, [*outputs, tensor], deadline)

    def _reduce_scatter(self, output: Tensor, inputs: list[Tensor], deadline: Deadline) -> None:
        into, parts, kind = _Part.of(output), [_Part.of(each) for each in inputs], self._summed_as(output)
        calls: list[Call]
        if _are_contiguous(parts):
            calls = [
                functools.partial(
                    self._nccl.reduce_scatter,
                    parts[0].address,
                    into.address,
                    output.numel(),
                    kind,
                    RedOp.SUM,
                )
            ]
        else:  # unequal parts: a reduction to its rank for each
            calls = [
                functools.partial(
                    self._nccl.reduce, part.address, into.address, each.numel(), kind, RedOp.SUM, root
                )
                for root, (each, part) in enumerate(zip(inputs, parts, strict=True))
                if part.count
            ]
        self._run("reduce_scatter", calls, [output, *inputs], deadline)

    def _broadcast(self, tensor: Tensor, src: int, deadline: Deadline) -> None:
        part = _Part.of(tensor)
        call = functools.partial(
            self._nccl.broadcast, part.address, part.address, part.count, part.dtype, src
        )
        self._run("broadcast", [call], [tensor], deadline)

    # -- from one rank to another ----------------------------------------------------------------

    def _exchange(
        self, sends: Sequence[tuple[Tensor, int]], recvs: Sequence[tuple[Tensor, int]], deadline: Deadline
    ) -> None:
        """All of them in one group of NCCL's, which is one operation. Empty tensors are not sent."""
        calls = [
            functools.partial(function, part.address, part.count, part.dtype, peer)
            for function, each in ((self._nccl.send, sends), (self._nccl.recv, recvs))
            for tensor, peer in each
            if (part := _Part.of(tensor)).count
        ]
        pairs = [*sends, *recvs]
        peers = {peer for _, peer in pairs}
        self._run("send and recv", calls, [tensor for tensor, _ in pairs], deadline, peers)

    # -- calls of NCCL -----------------------------------------------------------------------------

    def _summed_as(self, tensor: Tensor) -> DataType:
        return reduced_as(tensor.dtype, RedOp.SUM, self._nccl.version)

    def _run(
        self,
        name: str,
        calls: Sequence[Call],
        tensors: Sequence[Tensor],
        deadline: Deadline,
        among: Collection[int] | None = None,
    ) -> None:
        if any(tensor.numel() for tensor in tensors):  # otherwise those of all ranks are empty
            self._running().run(name, calls, tensors, deadline, among)

    def _running(self) -> Inflight:
        if self._inflight is None:
            raise ClosedError(f"{self!r} has no communicator of NCCL")
        return self._inflight

    def _synchronize(self, deadline: Deadline) -> None:
        if self._inflight is not None:
            self._inflight.drain(deadline)

    def _check_usable(self) -> None:
        super()._check_usable()
        if self._inflight is None:
            return
        if self._gpu.is_capturing():
            raise UnsupportedError(
                "a CUDA graph is being captured, and what it replays has no deadline and is not monitored:"
                f" {self!r} cannot be captured"
            )
        try:
            self._inflight.check()
        except KvplugError as e:
            self._break(e)
            raise

    # -- beside NCCL -------------------------------------------------------------------------------

    def _compare(
        self, calls: Mapping[int, bytes], deadline: Deadline, *, collective: bool
    ) -> Mapping[int, bytes]:
        with self._running().exclusive_mesh() as mesh:
            return mesh.compare(calls, deadline, collective=collective)

    def _give_up(self, error: BaseException) -> None:
        if self._inflight is not None:
            self._inflight.abort()
        super()._give_up(error)

    def _suspend(self) -> None:
        if self._inflight is None:
            return
        deadline = Deadline.after(self.context.timeout_s)
        self._inflight.drain(deadline)
        if self._nccl.has(_SUSPEND):
            self._inflight.suspend(deadline)
        else:
            logger.warning(
                "%r is suspended, and NCCL %s keeps its memory meanwhile: %s and later release it",
                self,
                self._nccl.version,
                OPTIONAL[_SUSPEND],
            )

    def _resume(self) -> None:
        if self._inflight is not None and self._nccl.has(_SUSPEND):
            self._inflight.resume(Deadline.after(self.context.timeout_s))

    def _destroy(self) -> None:
        self._mesh.abort()
        if self._inflight is not None:
            self._inflight.end()
