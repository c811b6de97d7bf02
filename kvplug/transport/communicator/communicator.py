"""The device communicator: collectives of one group of ranks on one kind of device.

The names and arguments follow the base communicator that engines have, without its defects: a global config
read in the constructor, layers found by their class names, arguments checked by ``assert``, missing v-forms,
and no deadlines. This package does the work that all transports share: checking arguments, computing sizes,
serving a group of one rank without a transport, and comparing the calls of the ranks. A transport of kind
"communicator" implements the methods of :class:`DeviceCommunicator` whose names begin with ``_``.
``Tensor`` is ``torch.Tensor``; this package does not import torch at module level.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

import attrs

from kvplug.config.addresses import DEFAULT_HOST
from kvplug.errors import (
    BusyError,
    ClosedError,
    ConfigError,
    KvplugError,
    TensorMismatchError,
    TransportError,
    UnsupportedError,
)
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.fork import close_after_fork
from kvplug.net.memory.room import MessageLimit
from kvplug.net.threads import ExitGuard
from kvplug.net.trust.credentials import Credentials
from kvplug.net.wire.tensors import dtype_name
from kvplug.transport.communicator.calls import (
    PAIRED,
    Call,
    TokenSplit,
    check_fillable,
    check_paired,
    check_same,
    describe,
    empty,
    in_one,
    is_outermost,
    joined,
    paired,
    plain,
    row_bytes,
    width_of,
    write_back,
)
from kvplug.transport.group.group import StatelessGroup
from kvplug.transport.group.mesh import Mesh, connect_ranks

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvplug.transport.pipe import PipeEndpoint

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


class DeviceCommunicator:
    """One rank's end of the collectives of a group.

    Law. Every rank gets the result that the collective's documentation states, no matter which rank calls
    first. A collective ends when every rank has called it. If a rank does not call it in time or has died,
    all other ranks raise a ``TimeoutError`` or ``PeerGoneError`` that names that rank. After such an error
    the ranks would be in different calls, so the communicator is broken: later calls raise ``TransportError``
    at once, and the caller must make a new communicator. Tensors and arguments that do not fit are refused
    before the call begins, at every rank if :attr:`compares` is true, and the communicator stays usable. A
    wrong ``timeout`` is refused at once, and only at its rank: the other ranks wait for that rank, which may
    repeat the call.

    Callers. The engine's model code. Every rank makes the same calls in the same order, from one thread at a
    time, else ``BusyError``; any thread may call ``destroy``. ``send``, ``recv`` and ``batch_isend_irecv``
    are called only by the ranks that they name.

    Not promised. That ``send`` returns before the other rank receives: if two ranks both send first, they
    wait for each other, unless they send in one batch.

    A transport may have an option to let calls return before the device is done. Then a call raises the
    errors of earlier calls, and results are valid once ``synchronize`` has returned.

    A transport connects the mesh, or implements ``_exchange``; the collectives use ``_exchange`` unless the
    transport overrides them. Its methods are called only if there is more than one rank. Their tensors are
    contiguous, of one dtype and on ``self.device``; the tensors of a list to gather into or to scatter are
    adjacent in memory. Each method raises a TimeoutError or PeerGoneError that names the missing ranks, and
    ClosedError after ``_destroy``.

    Raises:
        ConfigError: the number of the context's ``ranks`` differs from the size of the group.
    """

    @attrs.frozen(kw_only=True)
    class Context:
        """For the factory of a device communicator, which returns a ``DeviceCommunicator``."""

        options: Any
        """An instance of the spec's options class, or ``None``."""
        credentials: Credentials
        """The communicator's connections prove themselves with these."""
        host: str = DEFAULT_HOST
        """The interface that the data plane may use; loopback for a Unix socket."""
        group: StatelessGroup
        """The ranks that take part. The group carries their messages until the transport can. The caller owns
        the group."""
        device_group: Any = None
        """A group of the device's own library, if the engine already has one."""
        device: str = "cpu"
        """The device of this rank's tensors."""
        unique_name: str = ""
        """Distinguishes the engine's groups. With the word "ep" in it, the group serves expert
        parallelism."""
        ranks: tuple[int, ...] | None = attrs.field(default=None, converter=attrs.converters.optional(tuple))
        """The engine-wide ranks of the members, in the order of the group; ``None``: the group has all ranks
        of the engine."""
        global_world_size: int | None = None
        """How many ranks the engine has; ``None``: as many as ``ranks`` need."""
        data_parallel_size: int = attrs.field(default=1, validator=attrs.validators.ge(1))
        """How many replicas of the model share their experts."""
        timeout_s: float = 30.0
        """The default timeout of a collective."""

    @attrs.frozen
    class RecvOp:
        """In a batch: fill ``tensor`` with the tensor that rank ``src`` of the group sends."""

        tensor: Any
        """A contiguous tensor on the communicator's device, of the shape and dtype that is sent."""
        src: int
        """A rank of the group."""

    @attrs.frozen
    class SendOp:
        """In a batch: send ``tensor`` to rank ``dst`` of the group."""

        tensor: Any
        """A tensor on the communicator's device."""
        dst: int
        """A rank of the group."""

    devices: ClassVar[frozenset[str]] = frozenset({"cpu"})
    """Types of devices whose tensors the communicator takes."""
    sums: ClassVar[frozenset[str]] = SUMMED
    """dtypes, by torch's names, that ``all_reduce``, ``reduce_scatter``, ``reduce_scatterv`` and ``combine``
    take."""
    moves: ClassVar[frozenset[str]] = MOVED
    """dtypes that all other calls take."""
    compares: bool = True
    """Whether ranks compare their calls before each call, so that every rank refuses calls that do not match.
    A transport for which that costs too much makes it an option."""

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
        self._width = width_of(self.world_size, context.data_parallel_size) if self.use_all2all else 1
        """How many ranks share their tokens."""
        self._split: TokenSplit | None = None
        self._mesh = Mesh({})
        """Pipes to all other ranks, which a transport may connect. They carry calls, and the causes of failed
        calls. Without pipes, the group carries the calls."""
        self._busy = threading.Lock()
        self._broken = ""
        self._suspended = False
        self._destroyed = False
        close_after_fork(self)
        ExitGuard.register(self)

    def __repr__(self) -> str:
        name = f" {self.unique_name!r}" if self.unique_name else ""
        states = {"destroyed": self._destroyed, "broken": self._broken, "suspended": self._suspended}
        state = next((f", {name}" for name, is_so in states.items() if is_so), "")
        return f"<{type(self).__name__}{name}, rank {self.rank} of {self.world_size} on {self.device}{state}>"

    @property
    def destroyed(self) -> bool:
        """Whether ``destroy`` was called here, or this is a forked child."""
        return self._destroyed

    @property
    def suspended(self) -> bool:
        """Whether ``suspend`` was called here, without a later ``resume``."""
        return self._suspended

    def supports(self, device: str, dtype: torch.dtype | str, *, summing: bool = False) -> bool:
        """Whether calls accept tensors of ``dtype`` on ``device``. ``summing``: ask for calls that sum."""
        names = self.sums if summing else self.moves
        return device.partition(":")[0] in self.devices and dtype_name(dtype) in names

    # -- collectives ---------------------------------------------------------------------------------

    def all_reduce(self, input_: Tensor, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Tensor:
        """Replace ``input_`` with the sum of all ranks' tensors, and return it.

        Raises:
            TensorMismatchError: the ranks' calls differ, or their tensors differ in shape or dtype.
            UnsupportedError: the communicator does not take the device or dtype.
            TimeoutError, PeerGoneError: a rank, which the error names, made no call in time, or died.
            TransportError: the communicator is broken; the error says which failure broke it.
            ClosedError, BusyError: as the law says. Every collective below may raise all these errors.
        """
        with self._call(
            "all_reduce", timeout, lambda: self._described(input_, summing=True, filled=True)
        ) as deadline:
            if self.world_size > 1:
                work = plain(input_)
                self._all_reduce(work, deadline)
                write_back(input_, work)
        return input_

    def all_gather(self, input_: Tensor, dim: int = -1, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Tensor:
        """Concatenate all ranks' tensors, which have one shape, along ``dim`` in the order of ranks."""
        with self._call("all_gather", timeout, lambda: self._described(input_, dim=dim)) as deadline:
            return self._all_gathered(input_, dim, None, deadline)

    def all_gatherv(
        self,
        input_: Tensor | list[Tensor],
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        *,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Any:
        """Like ``all_gather``, with ``sizes[rank]`` elements along ``dim`` from each rank.

        Without ``sizes``, all ranks have the same number. If ``input_`` is a list, gather each of its
        tensors, and return a list.
        """
        tensors = input_ if isinstance(input_, list) else [input_]

        def check() -> str:
            texts = [self._described(tensor, dim=dim, sizes=sizes, vary=True) for tensor in tensors]
            return f"tensors {texts}" if isinstance(input_, list) else texts[0]

        with self._call("all_gatherv", timeout, check) as deadline:
            found = [self._all_gathered(tensor, dim, sizes, deadline) for tensor in tensors]
            return found if isinstance(input_, list) else found[0]

    def _all_gathered(
        self, tensor: Tensor, dim: int, sizes: Sequence[int] | None, deadline: Deadline
    ) -> Tensor:
        if self.world_size == 1:
            return tensor
        lengths = [tensor.shape[dim]] * self.world_size if sizes is None else sizes
        return self._gathered(tensor, dim % tensor.dim(), lengths, deadline)

    def reduce_scatter(self, input_: Tensor, dim: int = -1, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Tensor:
        """Sum all ranks' tensors, cut the sum into equal parts along ``dim``, and return this rank's part."""
        return self._reduce_scattered("reduce_scatter", input_, dim, None, timeout)

    def reduce_scatterv(
        self,
        input_: Tensor,
        dim: int = -1,
        sizes: Sequence[int] | None = None,
        *,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Tensor:
        """Like ``reduce_scatter``, with ``sizes[rank]`` elements along ``dim`` for each rank. Parts are equal
        if ``sizes`` is ``None``.
        """
        name = "reduce_scatter" if sizes is None else "reduce_scatterv"
        return self._reduce_scattered(name, input_, dim, sizes, timeout)

    def _reduce_scattered(
        self, name: str, input_: Tensor, dim: int, sizes: Sequence[int] | None, timeout: Timeout
    ) -> Tensor:
        def check() -> str:
            text = self._described(input_, dim=dim, sizes=sizes, summing=True)
            length = input_.shape[dim]
            if sizes is None and length % self.world_size:
                raise TensorMismatchError(
                    f"dimension {dim} has {length} elements, which cannot be cut into equal parts for"
                    f" {self.world_size} ranks"
                )
            if sizes is not None and sum(sizes) != length:
                raise TensorMismatchError(
                    f"sizes {list(sizes)} add up to {sum(sizes)}, but dimension {dim} has {length} elements"
                )
            return text

        with self._call(name, timeout, check) as deadline:
            if self.world_size == 1:
                return input_
            equal = [input_.shape[dim] // self.world_size] * self.world_size
            lengths = equal if sizes is None else sizes
            return self._scattered(input_, dim % input_.dim(), lengths, deadline)

    def gather(
        self, input_: Tensor, dst: int = 0, dim: int = -1, *, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> Tensor | None:
        """Return the result of ``all_gather`` at rank ``dst`` of the group, and ``None`` at all other ranks.

        Also raises ConfigError if the group has no rank ``dst``.
        """

        def check() -> str:
            self._check_rank("dst", dst)
            return self._described(input_, dim=dim, root=dst)

        with self._call("gather", timeout, check) as deadline:
            if self.world_size == 1:
                return input_
            work = plain(input_)
            here = self.rank_in_group
            if here != dst:
                self._exchange([(work, dst)], [], deadline)
                return None
            parts = [work if rank == here else empty(work, work.shape) for rank in range(self.world_size)]
            self._exchange([], [(part, rank) for rank, part in enumerate(parts) if rank != here], deadline)
            return joined(parts, dim)

    def broadcast(self, tensor: Tensor, src: int = 0, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Tensor:
        """Fill ``tensor`` with the tensor of rank ``src``, and return it. Raises as ``gather``."""

        def check() -> str:
            self._check_rank("src", src)
            return self._described(tensor, root=src, filled=True)

        with self._call("broadcast", timeout, check) as deadline:
            if self.world_size > 1:
                work = plain(tensor)
                self._broadcast(work, src, deadline)
                write_back(tensor, work)
        return tensor

    # -- from one rank to another -----------------------------------------------------------------

    def send(self, tensor: Tensor, dst: int | None = None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Send ``tensor`` to rank ``dst`` of the group; the next rank by default.

        Raises:
            TensorMismatchError: the other rank expects another shape or dtype. Raised at both ends.
            ConfigError: ``dst`` is not another rank of the group.
            The rest as the collectives.
        """
        peer = (self.rank_in_group + 1) % self.world_size if dst is None else dst
        with self._pairs_call([(tensor, peer)], [], timeout) as deadline:
            self._exchange([(plain(tensor), peer)], [], deadline)

    def recv(
        self,
        size: Sequence[int],
        dtype: torch.dtype,
        src: int | None = None,
        *,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Tensor:
        """Receive a tensor of shape ``size`` from rank ``src`` of the group; the previous rank by default.

        Raises as ``send``.
        """
        import torch

        peer = (self.rank_in_group - 1) % self.world_size if src is None else src
        self._check_usable()
        tensor = torch.empty(tuple(size), dtype=dtype, device=self.device)
        with self._pairs_call([], [(tensor, peer)], timeout) as deadline:
            self._exchange([], [(tensor, peer)], deadline)
        return tensor

    def batch_isend_irecv(
        self,
        p2p_ops: Sequence[DeviceCommunicator.SendOp | DeviceCommunicator.RecvOp],
        *,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> None:
        """Perform all these sends and receives at once. Return when all are done.

        Messages to one rank are received there in the same order, by a batch or by ``recv``. A batch cannot
        deadlock, whatever its order: two ranks may both send to each other.

        Raises:
            TensorMismatchError: another rank's ops do not fit these. If the batch involves only one other
                rank, nothing was begun. Otherwise other ranks may have begun, and the communicator is broken.
            ConfigError: the rank of an op is not another rank of the group.
            UnsupportedError: an item is neither a ``SendOp`` nor a ``RecvOp``.
            The rest as the collectives.
        """
        self._check_usable()
        for op in p2p_ops:
            if not isinstance(op, (DeviceCommunicator.SendOp, DeviceCommunicator.RecvOp)):
                raise UnsupportedError(f"a SendOp or a RecvOp is needed, not a {type(op).__qualname__}")
        sends = [(op.tensor, op.dst) for op in p2p_ops if isinstance(op, DeviceCommunicator.SendOp)]
        recvs = [(op.tensor, op.src) for op in p2p_ops if isinstance(op, DeviceCommunicator.RecvOp)]
        with self._pairs_call(sends, recvs, timeout) as deadline:
            into = [(plain(tensor), src) for tensor, src in recvs]
            self._exchange([(plain(tensor), dst) for tensor, dst in sends], into, deadline)
            for (tensor, _), (work, _) in zip(recvs, into, strict=True):
                write_back(tensor, work)

    # -- mixture of experts -------------------------------------------------------------------------

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
        """Send tokens to their experts. Return the three tensors, and ``extra_tensors`` if given, with the
        rows of all ranks.

        Tensors have a row for each token. Ranks may have different numbers of tokens, or no tokens. The ranks
        of one data-parallel rank have the same tokens, which are sent once; with ``is_sequence_parallel``
        each rank has its own tokens. If :attr:`use_all2all` is false, the arguments are returned unchanged.

        Raises:
            TensorMismatchError: tensors do not have a row for each token, or the ranks' tensors differ in
                dtype or in the shape of a row.
            The rest as the collectives.
        """
        return self._dispatch(
            "dispatch", [hidden_states, topk_weights, topk_ids], is_sequence_parallel, extra_tensors, timeout
        )

    def dispatch_router_logits(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[Tensor] | None = None,
        *,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> tuple[Any, ...]:
        """Dispatch the router's logits, before experts are chosen. Otherwise like ``dispatch``."""
        return self._dispatch(
            "dispatch_router_logits",
            [hidden_states, router_logits],
            is_sequence_parallel,
            extra_tensors,
            timeout,
        )

    def combine(
        self,
        hidden_states: Tensor,
        is_sequence_parallel: bool = False,
        *,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Tensor:
        """Return the experts' results to the tokens' ranks: this rank's rows of the sum over all ranks.

        ``hidden_states`` has a row for each token that the last dispatch returned, with zeros for tokens that
        no expert of this rank processed. The sum is complete: no rank has to add anything. If
        :attr:`use_all2all` is false, the argument is returned unchanged.

        Raises:
            TensorMismatchError: nothing was dispatched, or the last dispatch had another number of rows or
                another ``is_sequence_parallel``.
            The rest as the collectives.
        """
        if not self.use_all2all:
            self._check_usable()
            return hidden_states
        split = self._split

        def check() -> str:
            text = self._described(hidden_states, summing=True, dim=0)
            if split is None:
                raise TensorMismatchError("nothing was dispatched, so there is nothing to combine")
            if hidden_states.shape[0] != split.total:
                rows = hidden_states.shape[0]
                raise TensorMismatchError(f"{split.total} tokens were dispatched, but {rows} rows were given")
            if self._width > 1 and split.shared is bool(is_sequence_parallel):
                to, and_not = ("combine", "dispatch") if is_sequence_parallel else ("dispatch", "combine")
                raise TensorMismatchError(
                    f"is_sequence_parallel=True was given to {to}, but not to {and_not}"
                )
            return f"{text}, is_sequence_parallel {bool(is_sequence_parallel)}"

        with self._call("combine", timeout, check) as deadline:
            if self.world_size > 1:
                assert split is not None
                hidden_states = self._returned(hidden_states, split, deadline)
            self._split = None
        return hidden_states

    def _returned(self, hidden_states: Tensor, split: TokenSplit, deadline: Deadline) -> Tensor:
        """Return this rank's rows of the sum. Ranks that share their tokens need the same rows."""
        if not split.shared:
            return self._scattered(hidden_states, 0, split.sizes, deadline)
        total = plain(hidden_states).clone()
        self._all_reduce(total, deadline)
        return total[split.rows(self.rank_in_group)].clone()

    def prepare_communication_buffer_for_model(self, model: Any) -> None:
        """Prepare for a model that was loaded. If the communicator serves expert parallelism, call
        ``prepare_communication_buffer(communicator)`` of each module that has this method.

        Raises:
            ClosedError, TransportError: as the law says.
            The rest as the modules.
        """
        self._check_usable()
        if self.is_ep_communicator:
            for module in model.modules():
                prepare = getattr(module, "prepare_communication_buffer", None)
                if callable(prepare):
                    prepare(self)

    def _dispatch(
        self,
        name: str,
        tensors: list[Tensor],
        is_sequence_parallel: bool,
        extra_tensors: list[Tensor] | None,
        timeout: Timeout,
    ) -> tuple[Any, ...]:
        found = [*tensors, *(extra_tensors or ())]
        if not self.use_all2all:
            self._check_usable()
        else:

            def check() -> str:
                rows = [self._described(tensor, dim=0) and tensor.shape[0] for tensor in found]
                if len(set(rows)) > 1:
                    raise TensorMismatchError(
                        f"each tensor must have a row for each token, but their numbers of rows are {rows}"
                    )
                return (
                    f"rows {[f'{dtype_name(each.dtype)} {list(each.shape[1:])}' for each in found]},"
                    f" is_sequence_parallel {bool(is_sequence_parallel)},"
                    f" data_parallel_size {self.context.data_parallel_size}"
                )

            with self._attempt(timeout) as deadline:
                calls = self._agreed(name, check, deadline, tokens=found)
                width = 1 if is_sequence_parallel or self.world_size == 1 else self._width
                split = TokenSplit.of([call.tokens for call in calls], width)
                limit = MessageLimit(device=self.device)
                for tensor in found:
                    what = f"a tensor with the {split.total} tokens of all ranks"
                    limit.check_size(split.total * row_bytes(tensor), what)
                if self.world_size > 1:
                    own = split.sizes[self.rank_in_group]
                    found = [self._gathered(tensor[:own], 0, split.sizes, deadline) for tensor in found]
                self._split = split
        if extra_tensors is None:
            return tuple(found)
        return (*found[: len(tensors)], found[len(tensors) :])

    # -- the end ------------------------------------------------------------------------------------

    def synchronize(self, *, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Wait until all work that this rank's calls have begun has succeeded. Return at once if calls
        themselves wait for the device.

        Raises:
            TimeoutError, PeerGoneError: a call missed its deadline, or a rank has died; the error names it.
                All results since the last ``synchronize`` are invalid.
            The rest as the collectives.
        """
        with self._attempt(timeout) as deadline:
            self._synchronize(deadline)

    def suspend(self) -> None:
        """Release, while the engine sleeps, buffers of the device's library that ``resume`` can recreate.

        Every rank calls this between two collectives. Until ``resume``, other calls raise ``TransportError``.
        Idempotent.

        Raises:
            ClosedError, TransportError: as the law says.
            BusyError: a collective is under way in another thread.
        """
        if self._suspended and not self._destroyed:
            return
        with self._attempt(None):
            self._suspend()
            self._suspended = True

    def resume(self) -> None:
        """Recreate what ``suspend`` released. Every rank calls this. Idempotent. Raises as ``suspend``."""
        if self._suspended and not self._destroyed:
            self._suspended = False
            with self._attempt(None):
                self._resume()
        self._check_usable()

    def destroy(self) -> None:
        """Leave the group. Other ranks' calls that need this rank raise ``PeerGoneError``. This rank's calls,
        even blocked ones, raise ``ClosedError``. The caller still owns the groups that it passed in.
        Idempotent, never waits.
        """
        if not self._destroyed:
            self._destroyed = True
            self._destroy()

    def _end_at_exit(self) -> None:
        self.destroy()

    def _is_in_use(self) -> bool:
        return self._busy.locked()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

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

    def _connect(self, endpoint: PipeEndpoint) -> None:
        """Connect the mesh by pipes of this endpoint, for a transport that has no connections of its own. If
        that fails, destroy the communicator.

        Raises:
            As :func:`~kvplug.connect_ranks`.
        """
        try:
            self._mesh = Mesh(connect_ranks(self.cpu_group, endpoint, timeout=self.context.timeout_s))
        except BaseException:
            self.destroy()
            raise

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

    def _compare(
        self, calls: Mapping[int, bytes], deadline: Deadline, *, collective: bool
    ) -> Mapping[int, bytes]:
        """Send ``calls[rank]`` to each of these ranks, and return the calls that they send to this rank.

        ``collective``: ``calls`` names all other ranks, and all get the same call.
        """
        if self._mesh:
            return self._mesh.compare(calls, deadline, collective=collective)
        if collective:
            found = self.cpu_group.all_gather(next(iter(calls.values())), deadline.remaining())
            return {rank: found[rank] for rank in calls}
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
        calls = {self.rank_in_group: call}
        if self.world_size > 1 and (self.compares or tokens):
            calls.update(self._compared(dict.fromkeys(self._others, call), fault, deadline, collective=True))
        if fault is not None:
            raise fault
        agreed = [calls[rank] for rank in sorted(calls)]
        check_same(name, agreed)
        return agreed

    def _compared(
        self, calls: Mapping[int, Call], fault: KvplugError | None, deadline: Deadline, *, collective: bool
    ) -> dict[int, Call]:
        """Exchange calls with these ranks. If that fails and this rank has a ``fault``, raise the fault."""
        encoded = {call: call.encoded() for call in set(calls.values())}
        ours = {rank: encoded[call] for rank, call in calls.items()}
        try:
            found = self._compare(ours, deadline, collective=collective)
        except KvplugError as e:
            if fault is None:
                raise
            self._break(e)
            raise fault from e
        # Almost always all ranks send the same bytes.
        return {
            rank: calls[rank] if each == ours[rank] else Call.decoded(rank, each)
            for rank, each in found.items()
        }

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
        calls, wanted = {}, {}
        try:
            out = [(self._described(tensor), dst) for tensor, dst in sends]
            into = [(self._described(tensor, filled=True), src) for tensor, src in recvs]
            for peer in peers:
                ours, theirs = ([text for text, rank in each if rank == peer] for each in (out, into))
                calls[peer], wanted[peer] = paired(ours, theirs), paired(theirs, ours)
        except KvplugError as e:
            fault, calls = e, dict.fromkeys(peers, Call(PAIRED, refused=str(e)))
        if self.compares and peers:
            found = self._compared(calls, fault, deadline, collective=False)
            try:
                if fault is None:
                    check_paired(self.rank_in_group, calls, wanted, found)
            except TensorMismatchError as e:
                fault = e
            others_wait = self.world_size > 2 and any(each.call != PAIRED for each in found.values())
            if fault is not None and others_wait:
                self._break(fault)  # the other ranks in that collective learn of the fault only this way
        if fault is not None:
            raise fault

    @contextmanager
    def _attempt(self, timeout: Timeout) -> Iterator[Deadline]:
        """Admit one thread at a time. A call that fails after it has begun breaks the communicator."""
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
