"""The device communicator: collectives of one group of ranks on one kind of device.

The names and arguments are those of the family's base communicator; its defects (a global config read in the
constructor, ``assert`` for arguments, missing v-forms, no deadline) are not. What can be done once is done
here: arguments are checked, sizes computed, one rank served without a transport, and ranks told what each of
them is about to do. A transport of kind "communicator" implements the few methods at the end of
:class:`DeviceCommunicator`. ``Tensor`` is ``torch.Tensor``; this module does not import torch.
"""

from __future__ import annotations

import abc
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final

from kvplug.communicator.calls import (
    check_divisible,
    check_same,
    check_sum,
    describe,
    dtype_name,
    empty,
    joined,
    plain,
    write_back,
)
from kvplug.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.errors import (
    BusyError,
    ClosedError,
    ConfigError,
    KvplugError,
    TensorMismatchError,
    TransportError,
    UnsupportedError,
)
from kvplug.fork import close_after_fork

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvplug.context import CommunicatorContext

SUMMED: Final = frozenset(
    {"uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"}
)
MOVED: Final = SUMMED | {"bool", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"}

_EP = re.compile(r"(?<![a-zA-Z0-9])ep(?![a-zA-Z0-9])")
_REFUSALS = (UnsupportedError, TensorMismatchError, ConfigError, BusyError, ClosedError)
"""After these the communicator is as usable as before: nothing was begun, at no rank."""


class DeviceCommunicator(abc.ABC):
    """One rank's end of the collectives of a group.

    Law. Every rank gets what the collective's documentation says, whatever order the ranks come in. A
    collective ends when every rank has called it, in the same order of calls; a rank that does not come, or
    has died, is named in the ``TimeoutError`` or ``PeerGoneError`` of all the others. After either the
    communicator is broken, since ranks would be in different calls from then on: later calls raise
    ``TransportError`` at once, and who needs it makes another. Tensors and arguments that do not fit are
    refused before anything is begun, at every rank where :attr:`compares` is true, and it stays usable.

    Callers. The engine's model code, every rank the same calls in the same order, one thread at a time (else
    ``BusyError``); ``destroy`` from any thread.

    Not promised. That ``send`` returns before the other rank receives: two ranks that both send first, wait
    for each other.
    """

    devices: ClassVar[frozenset[str]] = frozenset({"cpu"})
    """Types of device whose tensors it takes."""
    sums: ClassVar[frozenset[str]] = SUMMED
    """dtypes, by torch's names, that ``all_reduce``, ``reduce_scatter`` and ``reduce_scatterv`` take."""
    moves: ClassVar[frozenset[str]] = MOVED
    """dtypes that all others take."""
    compares: ClassVar[bool] = True
    """Whether ranks tell each other what they are about to do, so that what does not fit is refused at every
    rank. Where it costs too much a transport makes it an option."""

    def __init__(self, context: CommunicatorContext) -> None:
        self.context = context
        self.cpu_group: Any = context.group
        self.device_group: Any = context.device_group
        self.device = context.device
        self.unique_name = context.unique_name
        self.rank_in_group: int = context.group.rank
        self.world_size: int = context.group.world_size
        self.rank: int = self.rank_in_group
        self.ranks: tuple[int, ...] = context.ranks or tuple(range(self.world_size))
        if len(self.ranks) != self.world_size:
            raise ConfigError(
                f"a group of {self.world_size} ranks, and the global ranks of {len(self.ranks)}: {self.ranks}"
            )
        self.global_rank = self.ranks[self.rank_in_group]
        self.global_world_size = context.global_world_size or max(self.ranks) + 1
        self.is_ep_communicator = bool(_EP.search(self.unique_name))
        self.use_all2all = self.is_ep_communicator and context.data_parallel_size > 1
        self.all2all_backend = context.all2all_backend
        self.all2all_manager: Any = None
        """What dispatch and combine go through; ``None`` where there is none, and they change nothing."""
        self._busy = threading.Lock()
        self._broken = ""
        self._destroyed = False
        close_after_fork(self)

    def __repr__(self) -> str:
        name = f" {self.unique_name!r}" if self.unique_name else ""
        state = ", destroyed" if self._destroyed else ", broken" if self._broken else ""
        return f"<{type(self).__name__}{name}, rank {self.rank} of {self.world_size} on {self.device}{state}>"

    @property
    def destroyed(self) -> bool:
        """Whether ``destroy`` was called here."""
        return self._destroyed

    def supports(self, device: str, dtype: torch.dtype | str, *, summing: bool = False) -> bool:
        """Whether tensors of ``dtype`` on ``device`` are taken; ``summing``: by what adds them up."""
        names = self.sums if summing else self.moves
        return device.partition(":")[0] in self.devices and dtype_name(dtype) in names

    # -- collectives ---------------------------------------------------------------------------

    def all_reduce(self, input_: Tensor, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Tensor:
        """Replace ``input_`` by the sum of all ranks' and return it.

        Raises:
            TensorMismatchError: the ranks' tensors differ in shape or dtype, or their calls do.
            UnsupportedError: device or dtype are not taken.
            TimeoutError, PeerGoneError: a rank did not come, or has died; names it.
            TransportError: the communicator is broken, and since when.
            ClosedError, BusyError: as the law says. All these hold for every collective below.
        """
        with self._call("all_reduce", timeout, lambda: self._said(input_, summing=True)) as deadline:
            if self.world_size > 1:
                work = plain(input_)
                self._all_reduce(work, deadline)
                write_back(input_, work)
        return input_

    def all_gather(self, input_: Tensor, dim: int = -1, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Tensor:
        """All ranks' tensors, of one shape, concatenated along ``dim`` in the order of ranks."""
        with self._call("all_gather", timeout, lambda: self._said(input_, dim=dim)) as deadline:
            if self.world_size == 1:
                return input_
            length = input_.shape[dim]
            return self._gathered(input_, dim % input_.dim(), [length] * self.world_size, deadline)

    def all_gatherv(
        self,
        input_: Tensor | list[Tensor],
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        *,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Any:
        """Like ``all_gather``, with ``sizes[rank]`` elements along ``dim`` from each rank.

        Without ``sizes`` all have as many. A list of tensors gives a list: each is gathered that way.
        """
        tensors = input_ if isinstance(input_, list) else [input_]

        def check() -> dict[str, Any]:
            said = [self._said(tensor, dim=dim, sizes=sizes, vary=True) for tensor in tensors]
            return {"tensors": said, "list": isinstance(input_, list)}

        with self._call("all_gatherv", timeout, check) as deadline:
            if self.world_size == 1:
                return input_
            made = []
            for tensor in tensors:
                lengths = [tensor.shape[dim]] * self.world_size if sizes is None else list(sizes)
                made.append(self._gathered(tensor, dim % tensor.dim(), lengths, deadline))
            return made if isinstance(input_, list) else made[0]

    def reduce_scatter(self, input_: Tensor, dim: int = -1, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Tensor:
        """This rank's part of the sum of all ranks' tensors, cut into equal parts along ``dim``."""

        def check() -> dict[str, Any]:
            said = self._said(input_, dim=dim, summing=True)
            check_divisible(input_.shape[dim], dim, self.world_size)
            return said

        with self._call("reduce_scatter", timeout, check) as deadline:
            if self.world_size == 1:
                return input_
            part = input_.shape[dim] // self.world_size
            return self._scattered(input_, dim % input_.dim(), [part] * self.world_size, deadline)

    def reduce_scatterv(
        self,
        input_: Tensor,
        dim: int = -1,
        sizes: Sequence[int] | None = None,
        *,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Tensor:
        """Like ``reduce_scatter``, with ``sizes[rank]`` elements along ``dim`` for each rank; equal ones if
        ``None``.
        """
        if sizes is None:
            return self.reduce_scatter(input_, dim, timeout=timeout)

        def check() -> dict[str, Any]:
            said = self._said(input_, dim=dim, sizes=sizes, summing=True)
            check_sum(input_.shape[dim], dim, sizes)
            return said

        with self._call("reduce_scatterv", timeout, check) as deadline:
            if self.world_size == 1:
                return input_
            return self._scattered(input_, dim % input_.dim(), list(sizes), deadline)

    def gather(
        self, input_: Tensor, dst: int = 0, dim: int = -1, *, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> Tensor | None:
        """At rank ``dst`` of the group what ``all_gather`` gives; ``None`` at all others.

        Raises ConfigError too: ``dst`` is no rank of the group.
        """

        def check() -> dict[str, Any]:
            self._check_rank("dst", dst)
            return self._said(input_, dim=dim, root=dst)

        with self._call("gather", timeout, check) as deadline:
            if self.world_size == 1:
                return input_
            work = plain(input_)
            if self.rank_in_group != dst:
                self._gather(None, work, dst, deadline)
                return None
            parts = [empty(work, work.shape) for _ in self.ranks]
            self._gather(parts, work, dst, deadline)
            return joined(parts, dim)

    def broadcast(self, tensor: Tensor, src: int = 0, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Tensor:
        """Fill ``tensor`` with rank ``src``'s of the group, and return it. Raises as ``gather``."""

        def check() -> dict[str, Any]:
            self._check_rank("src", src)
            return self._said(tensor, root=src)

        with self._call("broadcast", timeout, check) as deadline:
            if self.world_size > 1:
                work = plain(tensor)
                self._broadcast(work, src, deadline)
                write_back(tensor, work)
        return tensor

    # -- from one rank to another --------------------------------------------------------------

    def send(self, tensor: Tensor, dst: int | None = None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Send to rank ``dst`` of the group; the next one where nothing is said.

        Raises:
            TensorMismatchError: the other rank wants another shape or dtype; at both ends.
            ConfigError: ``dst`` is no other rank of the group.
            The rest as the collectives.
        """
        peer = (self.rank_in_group + 1) % self.world_size if dst is None else dst
        with self._pair_call("send", peer, timeout, lambda: self._said(tensor)) as deadline:
            self._send(plain(tensor), peer, deadline)

    def recv(
        self,
        size: Sequence[int],
        dtype: torch.dtype,
        src: int | None = None,
        *,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Tensor:
        """A tensor of that shape from rank ``src`` of the group; the previous one where nothing is said.

        Raises as ``send``.
        """
        import torch

        peer = (self.rank_in_group - 1) % self.world_size if src is None else src
        self._check_usable()
        tensor = torch.empty(tuple(size), dtype=dtype, device=self.device)
        with self._pair_call("recv", peer, timeout, lambda: self._said(tensor)) as deadline:
            self._recv(tensor, peer, deadline)
        return tensor

    # -- experts -------------------------------------------------------------------------------

    def dispatch(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[Tensor] | None = None,
        *,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> tuple[Any, ...]:
        """Bring tokens to their experts: the same three, and ``extra_tensors`` where given. Nothing here."""
        same = (hidden_states, topk_weights, topk_ids)
        return same if extra_tensors is None else (*same, extra_tensors)

    def dispatch_router_logits(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[Tensor] | None = None,
        *,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> tuple[Any, ...]:
        """The same before experts are chosen: these two, and ``extra_tensors`` where given. Nothing here."""
        same = (hidden_states, router_logits)
        return same if extra_tensors is None else (*same, extra_tensors)

    def combine(
        self,
        hidden_states: Tensor,
        is_sequence_parallel: bool = False,
        *,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Tensor:
        """Bring what experts made back to the tokens' ranks. Nothing here."""
        return hidden_states

    def prepare_communication_buffer_for_model(self, model: Any) -> None:
        """Once after a model was loaded: where this communicator serves experts, each of its modules that
        has a method ``prepare_communication_buffer(communicator)`` is called with it.
        """
        self._check_usable()
        if self.is_ep_communicator:
            for module in model.modules():
                prepare = getattr(module, "prepare_communication_buffer", None)
                if callable(prepare):
                    prepare(self)

    # -- its end -------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Leave: other ranks' calls that need this one raise ``PeerGoneError``, and this rank's own
        ``ClosedError``, also one that is blocked. The group stays its maker's. Idempotent, never waits.
        """
        if not self._destroyed:
            self._destroyed = True
            self._destroy()

    def __enter__(self) -> DeviceCommunicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    def _after_fork_in_child(self) -> None:
        self._destroyed = True
        self._busy = threading.Lock()

    # -- what a transport writes ---------------------------------------------------------------
    #
    # Tensors are contiguous, of one dtype, on ``self.device``, and there is more than one rank. Each raises
    # TimeoutError or PeerGoneError that names the ranks that are missing, ClosedError after ``_destroy``.

    @abc.abstractmethod
    def _all_reduce(self, tensor: Tensor, deadline: Deadline) -> None:
        """Replace it by the sum of all ranks'."""

    @abc.abstractmethod
    def _all_gather(self, outputs: list[Tensor], tensor: Tensor, deadline: Deadline) -> None:
        """Fill ``outputs[r]`` with rank r's tensor. Their shapes may differ, also be empty."""

    @abc.abstractmethod
    def _reduce_scatter(self, output: Tensor, inputs: list[Tensor], deadline: Deadline) -> None:
        """Fill ``output`` with the sum of all ranks' ``inputs[this rank]``. Shapes may differ by rank."""

    @abc.abstractmethod
    def _broadcast(self, tensor: Tensor, src: int, deadline: Deadline) -> None:
        """Fill it with rank ``src``'s."""

    @abc.abstractmethod
    def _send(self, tensor: Tensor, dst: int, deadline: Deadline) -> None:
        """To rank ``dst``; when it returns the tensor may be overwritten."""

    @abc.abstractmethod
    def _recv(self, tensor: Tensor, src: int, deadline: Deadline) -> None:
        """Fill it with what rank ``src`` sends."""

    @abc.abstractmethod
    def _destroy(self) -> None:
        """Give everything back, and wake this rank's calls and those of the others that need it."""

    def _gather(self, outputs: list[Tensor] | None, tensor: Tensor, dst: int, deadline: Deadline) -> None:
        """``outputs`` are given at ``dst`` only. Here rank after rank; a transport may know better."""
        if outputs is None:
            self._send(tensor, dst, deadline)
            return
        for rank, output in enumerate(outputs):
            if rank == dst:
                output.copy_(tensor)
            else:
                self._recv(output, rank, deadline)

    def _compare(self, call: Mapping[str, Any], deadline: Deadline) -> Sequence[Mapping[str, Any]]:
        """Every rank's ``call``, plain values. Through the group, unless a transport knows better."""
        found: list[Mapping[str, Any]] = self.cpu_group.all_gather(dict(call), deadline.remaining())
        return found

    def _compare_pair(self, call: Mapping[str, Any], peer: int, deadline: Deadline) -> Mapping[str, Any]:
        """One other rank's ``call``, which gets ours."""
        self.cpu_group.send(dict(call), peer)
        found: Mapping[str, Any] = self.cpu_group.recv(peer, deadline.remaining())
        return found

    # -- beneath -------------------------------------------------------------------------------

    @contextmanager
    def _call(self, name: str, timeout: Timeout, check: Callable[[], dict[str, Any]]) -> Iterator[Deadline]:
        """Around one collective: its arguments are checked here, then compared with the other ranks'."""
        with self._attempt(timeout) as deadline:
            with self._agreed(name, check, lambda call: self._compare(call, deadline)) as calls:
                check_same(name, calls)
            yield deadline

    @contextmanager
    def _pair_call(
        self, name: str, peer: int, timeout: Timeout, check: Callable[[], dict[str, Any]]
    ) -> Iterator[Deadline]:
        """The same around ``send`` and ``recv``."""
        self._check_rank("dst" if name == "send" else "src", peer, other=True)
        with self._attempt(timeout) as deadline:
            both = [self.rank_in_group, peer]
            exchange = lambda call: [call, self._compare_pair(call, peer, deadline)]  # noqa: E731
            with self._agreed(name, check, exchange) as calls:
                if sorted(call["call"] for call in calls) == ["recv", "send"]:
                    calls = [{**call, "call": "send and recv"} for call in calls]
                check_same("send and recv", calls, both)
            yield deadline

    @contextmanager
    def _attempt(self, timeout: Timeout) -> Iterator[Deadline]:
        """One thread at a time; what fails in the middle breaks the communicator."""
        self._check_usable()
        deadline = Deadline.after(timeout, self.context.timeout_s)
        if not self._busy.acquire(blocking=False):
            raise BusyError("another thread is in a collective of this communicator already")
        try:
            yield deadline
        except _REFUSALS:
            raise
        except BaseException as e:
            if self._destroyed:
                raise ClosedError(f"{self!r} was destroyed during the call") from e
            self._broken = f"{type(e).__name__}: {e}"
            raise
        finally:
            self._busy.release()

    @contextmanager
    def _agreed(
        self,
        name: str,
        check: Callable[[], dict[str, Any]],
        exchange: Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]],
    ) -> Iterator[Sequence[Mapping[str, Any]]]:
        """What all ranks are about to do; a rank whose own arguments are wrong tells the others so first."""
        alone = self.world_size == 1 or not self.compares
        fault: KvplugError | None = None
        try:
            call = {"call": name, **check()}
        except KvplugError as e:
            fault, call = e, {"call": name, "refused": str(e)}
        if fault is not None and alone:
            raise fault
        calls: Sequence[Mapping[str, Any]] = [call]
        if not alone:
            try:
                calls = exchange(call)
            except KvplugError as e:
                if fault is None:
                    raise
                self._broken = f"{type(e).__name__}: {e}"
                raise fault from e
        if fault is not None:
            raise fault
        yield calls

    def _gathered(self, tensor: Tensor, dim: int, lengths: Sequence[int], deadline: Deadline) -> Tensor:
        work = plain(tensor)
        shapes = [(*work.shape[:dim], length, *work.shape[dim + 1 :]) for length in lengths]
        parts = [empty(work, shape) for shape in shapes]
        self._all_gather(parts, work, deadline)
        return joined(parts, dim)

    def _scattered(self, tensor: Tensor, dim: int, lengths: Sequence[int], deadline: Deadline) -> Tensor:
        parts = [plain(part) for part in tensor.split(list(lengths), dim)]
        output = empty(tensor, parts[self.rank_in_group].shape)
        self._reduce_scatter(output, parts, deadline)
        return output

    def _said(self, tensor: Tensor, *, summing: bool = False, **given: Any) -> dict[str, Any]:
        """Check a tensor and what comes with it; what must be the same at every rank, in plain values."""
        self._check_taken(tensor, summing=summing)
        return describe(tensor, rank=self.rank_in_group, world_size=self.world_size, **given)

    def _check_taken(self, tensor: Any, *, summing: bool = False) -> None:
        if not hasattr(tensor, "dtype") or not hasattr(tensor, "device"):
            raise UnsupportedError(f"a torch.Tensor is needed, not a {type(tensor).__qualname__}")
        self._check_dtype(tensor.dtype, str(tensor.device), summing=summing)

    def _check_dtype(self, dtype: Any, device: str, *, summing: bool) -> None:
        near = device.partition(":")[0] == self.device.partition(":")[0]
        if not near or not self.supports(device, dtype, summing=summing):
            taken = ", ".join(sorted(self.sums if summing else self.moves))
            raise UnsupportedError(
                f"a {dtype_name(dtype)} tensor on {device} was given; {self!r} takes, on"
                f" {self.device}{', to be summed' if summing else ''}: {taken}"
            )

    def _check_rank(self, what: str, rank: int, *, other: bool = False) -> None:
        if type(rank) is not int or not 0 <= rank < self.world_size or (other and rank == self.rank_in_group):
            which = "another rank" if other else "a rank"
            raise ConfigError(
                f"{what}={rank!r} was given, and {which} of this group is wanted: 0 to"
                f" {self.world_size - 1}; this is rank {self.rank_in_group}"
            )

    def _check_usable(self) -> None:
        if self._destroyed:
            raise ClosedError(f"{self!r} is destroyed")
        if self._broken:
            raise TransportError(
                f"{self!r}: ranks may be in different calls since one failed ({self._broken}); make another"
            )
