"""One rank of a group: its attributes, the methods that a transport implements, and the checks around every
call."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from kvplug.errors import (
    BusyError,
    ClosedError,
    ConfigError,
    KvplugError,
    TensorMismatchError,
    TransportError,
    UnsupportedError,
)
from kvplug.net.deadline import Deadline, Timeout
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.fork import close_after_fork
from kvplug.net.threads import ExitGuard
from kvplug.net.wire.tensors import dtype_name
from kvplug.transport.communicator.calls import (
    PAIRED,
    Call,
    check_fillable,
    check_paired,
    check_same,
    describe,
    empty,
    in_one,
    is_outermost,
    joined,
    plain,
)
from kvplug.transport.communicator.experts import DEFAULT_BACKEND
from kvplug.transport.group.mesh import Mesh

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvplug.transport.communicator.communicator import DeviceCommunicator

T = TypeVar("T")
Pairs = Sequence[tuple["Tensor", int]]

SUMMED: Final = frozenset(
    {"uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"}
)
MOVED: Final = SUMMED | {"bool", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"}
_SUMMED_WHOLE_BYTES: Final = 64 * 1024
"""The largest tensor that all ranks send whole to each other, in one step instead of two."""
REFUSALS: Final = (UnsupportedError, TensorMismatchError, ConfigError, BusyError, ClosedError)
"""After these errors the communicator stays usable: no rank has begun the call."""
_EP = re.compile(r"(?<![a-zA-Z0-9])ep(?![a-zA-Z0-9])")


class GroupRank:
    """What all calls of a device communicator share: attributes, checks, and the methods that a transport
    implements.

    A transport connects the mesh, or implements ``_exchange``; the collectives are made of it unless the
    transport has its own. Its methods are called only if there is more than one rank. Their tensors are
    contiguous, of one dtype and on ``self.device``; the tensors of a list to gather into or to scatter are
    adjacent in memory. Each method raises a TimeoutError or PeerGoneError that names the missing ranks, and
    ClosedError after ``_destroy``.
    """

    devices: ClassVar[frozenset[str]] = frozenset({"cpu"})
    """Types of devices whose tensors the communicator takes."""
    sums: ClassVar[frozenset[str]] = SUMMED
    """dtypes, by torch's names, that ``all_reduce``, ``reduce_scatter``, ``reduce_scatterv`` and ``combine``
    take."""
    moves: ClassVar[frozenset[str]] = MOVED
    """dtypes that all other calls take."""
    compares: bool = True
    """Whether ranks compare their calls before each call, so that every rank refuses calls that do not match.
    If that costs too much, a transport makes it an option."""

    def __init__(self, context: DeviceCommunicator.Context) -> None:
        self.context = context
        """The context that the factory received."""
        self.cpu_group: Any = context.group
        """The ranks' :class:`~kvplug.StatelessGroup`."""
        self.device_group: Any = context.device_group
        """The group of the device's own library: the engine's group if it passed one, else a new group."""
        self.device = context.device
        """The device of this rank's tensors."""
        self.unique_name = context.unique_name
        """The name from the context."""
        self.rank_in_group: int = context.group.rank
        """This rank's number in the group."""
        self.world_size: int = context.group.world_size
        """How many ranks the group has."""
        self.rank: int = self.rank_in_group
        """The same as ``rank_in_group``."""
        self.ranks: tuple[int, ...] = context.ranks or tuple(range(self.world_size))
        """The engine-wide ranks of the group's members."""
        if len(self.ranks) != self.world_size:
            raise ConfigError(
                f"the group has {self.world_size} ranks, but {len(self.ranks)} global ranks were given:"
                f" {self.ranks}"
            )
        self.global_rank = self.ranks[self.rank_in_group]
        """This rank's number in the engine."""
        self.global_world_size = context.global_world_size or max(self.ranks) + 1
        """How many ranks the engine has."""
        self.is_ep_communicator = bool(_EP.search(self.unique_name))
        """Whether the communicator serves expert parallelism: whether its name contains the word "ep"."""
        self.use_all2all = self.is_ep_communicator and context.data_parallel_size > 1
        """Whether ranks exchange tokens for experts: with expert parallelism and several replicas."""
        self.all2all_backend = context.all2all_backend or DEFAULT_BACKEND
        """How ranks exchange tokens for experts."""
        self._mesh = Mesh({})
        """Pipes to all other ranks, which a transport may connect. They carry calls, and the causes of failed
        calls. Without pipes, the group carries the calls."""
        self._busy = threading.Lock()
        self._broken = ""
        self._suspended = False
        self._destroyed = False
        close_after_fork(self)

    def __repr__(self) -> str:
        name = f" {self.unique_name!r}" if self.unique_name else ""
        states = {"destroyed": self._destroyed, "broken": self._broken, "suspended": self._suspended}
        state = next((f", {name}" for name, is_so in states.items() if is_so), "")
        return f"<{type(self).__name__}{name}, rank {self.rank} of {self.world_size} on {self.device}{state}>"

    @property
    def destroyed(self) -> bool:
        """Whether ``destroy`` was called here."""
        return self._destroyed

    @property
    def suspended(self) -> bool:
        """Whether ``suspend`` was called here, without a later ``resume``."""
        return self._suspended

    def supports(self, device: str, dtype: torch.dtype | str, *, summing: bool = False) -> bool:
        """Whether calls accept tensors of ``dtype`` on ``device``. ``summing``: ask for calls that sum."""
        names = self.sums if summing else self.moves
        return device.partition(":")[0] in self.devices and dtype_name(dtype) in names

    # -- what a transport writes ------------------------------------------------------------------

    def _all_reduce(self, tensor: Tensor, deadline: Deadline) -> None:
        """Replace the tensor with the sum of all ranks' tensors.

        By default, each rank sums one part for all ranks. A small tensor is summed whole at every rank.
        """
        flat = tensor.view(-1)
        if tensor.nbytes > _SUMMED_WHOLE_BYTES:
            parts = [*flat.tensor_split(self.world_size)]
            mine = parts[self.rank_in_group]
            self._reduce_scatter(mine, parts, deadline)
            self._all_gather(parts, mine, deadline)
            return
        _, everyones = in_one(flat, [flat.shape] * self.world_size)
        self._all_gather(everyones, flat, deadline)
        total, *others = everyones
        for each in others:  # in the order of ranks, so that the sum has the same bits at every rank
            total.add_(each)
        flat.copy_(total)

    def _all_gather(self, outputs: list[Tensor], tensor: Tensor, deadline: Deadline) -> None:
        """Fill ``outputs[r]`` with rank r's tensor. Shapes may differ, and tensors may be empty."""
        self._all_to_all([tensor] * self.world_size, outputs, deadline)

    def _reduce_scatter(self, output: Tensor, inputs: list[Tensor], deadline: Deadline) -> None:
        """Fill ``output`` with the sum of all ranks' ``inputs[this rank]``. Shapes may differ by rank.

        ``output`` may be ``inputs[this rank]``.
        """
        _, parts = in_one(output, [output.shape] * self.world_size)
        parts[self.rank_in_group] = output
        self._all_to_all(inputs, parts, deadline)
        for rank in self._others:
            output.add_(parts[rank])

    def _broadcast(self, tensor: Tensor, src: int, deadline: Deadline) -> None:
        """Fill the tensor with the tensor of rank ``src``."""
        if self.rank_in_group == src:
            sends, recvs = [(tensor, rank) for rank in self._others], []
        else:
            sends, recvs = [], [(tensor, src)]
        with self._mesh.diagnose():
            self._exchange(sends, recvs, deadline)

    def _all_to_all(self, inputs: list[Tensor], outputs: list[Tensor], deadline: Deadline) -> None:
        """Send ``inputs[r]`` to each rank r, and fill ``outputs[r]`` from it."""
        outputs[self.rank_in_group].copy_(inputs[self.rank_in_group])
        sends, recvs = ([(tensors[rank], rank) for rank in self._others] for tensors in (inputs, outputs))
        with self._mesh.diagnose():
            self._exchange(sends, recvs, deadline)

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.rank_in_group]

    def _exchange(self, sends: Pairs, recvs: Pairs, deadline: Deadline) -> None:
        """Send each tensor of ``sends`` to its rank, and fill each tensor of ``recvs`` from its rank, all at
        once.

        Tensors to one rank arrive in order. When this returns, the sent tensors may be overwritten. By
        default, the mesh is used; its pipes must carry such tensors.
        """
        self._mesh.exchange(sends, recvs, deadline)

    def _destroy(self) -> None:
        """Release everything, and wake this rank's calls and the calls of other ranks that need this rank.

        By default, leave the mesh. A transport that overrides this calls it too, and releases its own
        resources.
        """
        if self._busy.acquire(blocking=False):  # else the rank leaves in the middle of a call
            try:
                self._mesh.leave()
            finally:
                self._busy.release()
        self._mesh.abort()

    def _compare(self, call: bytes, deadline: Deadline) -> Sequence[bytes]:
        """Exchange calls with all ranks, and return every rank's ``call``."""
        if self._mesh:
            return self._mesh.compare(call, deadline)
        found: list[bytes] = self.cpu_group.all_gather(call, deadline.remaining())
        return found

    def _compare_pairs(self, calls: Mapping[int, bytes], deadline: Deadline) -> Mapping[int, bytes]:
        """Send ``calls[rank]`` to each of these ranks, and return the calls that they send to this rank."""
        if self._mesh:
            self._mesh.send(calls, deadline)
            return self._mesh.recv(calls, deadline)
        for peer, call in calls.items():
            self.cpu_group.send(call, peer)
        return {peer: self.cpu_group.recv(peer, deadline.remaining()) for peer in calls}

    def _give_up(self, error: BaseException) -> None:
        """Inform the other ranks, if possible, that a call failed after it had begun and that no other call
        will begin. Never waits or raises.
        """
        self._mesh.give_up(error)

    def _synchronize(self, deadline: Deadline) -> None:
        """Wait for the device if calls return before it is done. By default they do not."""

    def _suspend(self) -> None:
        """Release what ``_resume`` can recreate."""

    def _resume(self) -> None:
        """Recreate what ``_suspend`` released."""

    # -- checks ------------------------------------------------------------------------------------

    @contextmanager
    def _call(self, name: str, timeout: Timeout, check: Callable[[], str]) -> Iterator[Deadline]:
        """Run one collective: check its arguments, then compare them with those of the other ranks."""
        with self._attempt(timeout) as deadline:
            self._agreed(name, check, deadline)
            yield deadline

    def _agreed(
        self, name: str, check: Callable[[], str], deadline: Deadline, tokens: Sequence[Tensor] = ()
    ) -> Sequence[Call]:
        """Check that all ranks make the same call, and return their calls, which differ only in their numbers
        of tokens. A rank with wrong arguments informs the other ranks before it raises.

        ``tokens``: tensors with a row for each token. The ranks exchange their numbers of tokens even if they
        do not compare calls.
        """
        fault: KvplugError | None = None
        try:
            call = Call(name, check(), tokens=tokens[0].shape[0] if tokens else 0)
        except KvplugError as e:
            fault, call = e, Call(name, refused=str(e))
        calls: Sequence[Call] = [call]
        if self.world_size > 1 and (self.compares or tokens):
            ours = call.encoded()
            found = self._exchanged(lambda: self._compare(ours, deadline), fault)
            # Almost always all ranks send the same bytes.
            calls = [call if each == ours else Call.decoded(rank, each) for rank, each in enumerate(found)]
        if fault is not None:
            raise fault
        check_same(name, calls)
        return calls

    def _exchanged(self, exchange: Callable[[], T], fault: KvplugError | None) -> T:
        """Return the result of ``exchange``. If it fails and this rank has a ``fault``, raise the fault."""
        try:
            return exchange()
        except KvplugError as e:
            if fault is None:
                raise
            self._break(e)
            raise fault from e

    @contextmanager
    def _pairs_call(self, sends: Pairs, recvs: Pairs, timeout: Timeout) -> Iterator[Deadline]:
        """Run a call between this rank and some other ranks."""
        for what, pairs in (("dst", sends), ("src", recvs)):
            for _, peer in pairs:
                self._check_rank(what, peer, other=True)
        peers = sorted({peer for _, peer in (*sends, *recvs)})
        with self._attempt(timeout) as deadline:
            try:
                self._agree_in_pairs(sends, recvs, peers, deadline)
            except REFUSALS as e:
                if len(peers) > 1:
                    self._break(e)  # a peer that agreed has begun, and waits for this rank
                raise
            yield deadline

    def _agree_in_pairs(self, sends: Pairs, recvs: Pairs, peers: Sequence[int], deadline: Deadline) -> None:
        fault: KvplugError | None = None
        try:
            out, into = (
                [(self._described(tensor, filled=pairs is recvs), peer) for tensor, peer in pairs]
                for pairs in (sends, recvs)
            )
            calls = {
                peer: Call(
                    PAIRED,
                    sends=tuple(text for text, dst in out if dst == peer),
                    recvs=tuple(text for text, src in into if src == peer),
                )
                for peer in peers
            }
        except KvplugError as e:
            fault, calls = e, {peer: Call(PAIRED, refused=str(e)) for peer in peers}
        if self.compares and peers:
            ours = {peer: call.encoded() for peer, call in calls.items()}
            found = self._exchanged(lambda: self._compare_pairs(ours, deadline), fault)
            theirs = {peer: Call.decoded(peer, each) for peer, each in found.items()}
            try:
                if fault is None:
                    check_paired(self.rank_in_group, calls, theirs)
            except TensorMismatchError as e:
                fault = e
            others_wait = self.world_size > 2 and not all(their.is_paired for their in theirs.values())
            if fault is not None and others_wait:
                self._break(fault)  # the other ranks in that collective learn of the fault only this way
        if fault is not None:
            raise fault

    @contextmanager
    def _attempt(self, timeout: Timeout) -> Iterator[Deadline]:
        """Let one thread in at a time. A call that fails after it has begun breaks the communicator."""
        try:
            self._check_usable()
            deadline = Deadline.after(timeout, self.context.timeout_s)
            if not self._busy.acquire(blocking=False):
                raise BusyError("another thread is already in a collective of this communicator")
            try:
                # The thread whose call has just ended may have broken the communicator, and a program that
                # exits may have destroyed it without noticing this call.
                self._check_whole()
                yield deadline
            except REFUSALS:
                raise
            except BaseException as e:
                if self._destroyed:
                    raise ClosedError(f"{self!r} was destroyed during the call") from e
                self._break(NamedExhaustion.of(e, repr(self)) or e)
                NamedExhaustion.check(e, repr(self))
                raise
            finally:
                self._busy.release()
        except BaseException:
            ExitGuard.hold()
            raise

    def _break(self, error: BaseException) -> None:
        if not self._broken:
            self._broken = f"{type(error).__name__}: {error}"
            self._give_up(error)

    def _described(self, tensor: Tensor, *, summing: bool = False, filled: bool = False, **given: Any) -> str:
        """Check a tensor and its arguments, and describe what must be the same at every rank.

        ``filled``: the call writes to the tensor.
        """
        self._check_taken(tensor, summing=summing)
        if filled:
            check_fillable(tensor)
        if "dim" in given and type(given["dim"]) is not int:
            raise TensorMismatchError(f"dim must be the number of a dimension, not {given['dim']!r}")
        return describe(tensor, rank=self.rank_in_group, world_size=self.world_size, **given)

    def _check_taken(self, tensor: Any, *, summing: bool = False) -> None:
        if not hasattr(tensor, "dtype") or not hasattr(tensor, "device"):
            raise UnsupportedError(f"a torch.Tensor is needed, not a {type(tensor).__qualname__}")
        layout = str(getattr(tensor, "layout", "no layout"))  # a NumPy array has a dtype and a device, too
        if layout != "torch.strided":
            raise UnsupportedError(
                f"a dense torch.Tensor is needed, not a {type(tensor).__qualname__} with {layout}"
            )
        dtype, device = tensor.dtype, str(tensor.device)
        if not self._is_here(device) or not self.supports(device, dtype, summing=summing):
            taken = ", ".join(sorted(self.sums if summing else self.moves))
            raise UnsupportedError(
                f"{self!r} cannot {'sum' if summing else 'move'} a {dtype_name(dtype)} tensor on {device};"
                f" it takes these dtypes on {self.device}: {taken}"
            )

    def _is_here(self, device: str) -> bool:
        """Whether ``device`` is of the same type as this rank's, with the same index if both have one."""
        kind, _, index = device.partition(":")
        our_kind, _, our_index = self.device.partition(":")
        return kind == our_kind and (not index or not our_index or index == our_index)

    def _check_rank(self, what: str, rank: int, *, other: bool = False) -> None:
        if type(rank) is not int or not 0 <= rank < self.world_size or (other and rank == self.rank_in_group):
            which = "another rank" if other else "a rank"
            raise ConfigError(
                f"{what}={rank!r} must be {which} of this group, 0 to {self.world_size - 1}; this is rank"
                f" {self.rank_in_group}"
            )

    def _check_usable(self) -> None:
        self._check_whole()
        if self._suspended:
            raise TransportError(f"{self!r}: call resume() at every rank first")

    def _check_whole(self) -> None:
        if self._destroyed:
            raise ClosedError(f"{self!r} is destroyed")
        if self._broken:
            raise TransportError(
                f"{self!r}: ranks may be in different calls since a call failed ({self._broken}); make"
                " another communicator"
            )

    def _after_fork_in_child(self) -> None:
        self._destroyed = True

    # -- shared by several methods ---------------------------------------------------------------

    def _gathered(self, tensor: Tensor, dim: int, lengths: Sequence[int], deadline: Deadline) -> Tensor:
        work = plain(tensor)
        before, after = work.shape[:dim], work.shape[dim + 1 :]
        whole, parts = in_one(work, [(*before, length, *after) for length in lengths])
        self._all_gather(parts, work, deadline)
        if is_outermost(work.shape, dim):
            return whole.view(*before, sum(lengths), *after)
        return joined(parts, dim)

    def _scattered(self, tensor: Tensor, dim: int, lengths: Sequence[int], deadline: Deadline) -> Tensor:
        if is_outermost(tensor.shape, dim):
            parts = list(plain(tensor).split(list(lengths), dim))
        else:
            cut = tensor.detach().split(list(lengths), dim)
            _, parts = in_one(tensor, [part.shape for part in cut])
            for part, original in zip(parts, cut, strict=True):
                part.copy_(original)
        output = empty(tensor, parts[self.rank_in_group].shape)
        self._reduce_scatter(output, parts, deadline)
        return output
