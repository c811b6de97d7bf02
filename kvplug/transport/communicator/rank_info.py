"""One rank of a group: its numbers, the tensors it accepts, and whether it is still usable."""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Any, ClassVar, Final

from kvplug.errors import ClosedError, ConfigError, TransportError, UnsupportedError
from kvplug.net.fork import close_after_fork
from kvplug.transport.communicator.calls import dtype_name

if TYPE_CHECKING:
    import torch

    from kvplug.transport.context import CommunicatorContext

SUMMED: Final = frozenset(
    {"uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"}
)
MOVED: Final = SUMMED | {"bool", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"}

_EP = re.compile(r"(?<![a-zA-Z0-9])ep(?![a-zA-Z0-9])")


class RankInfo:
    """The attributes of a device communicator, and the checks that need no other rank."""

    devices: ClassVar[frozenset[str]] = frozenset({"cpu"})
    """Types of device whose tensors it takes."""
    sums: ClassVar[frozenset[str]] = SUMMED
    """dtypes, by torch's names, that ``all_reduce``, ``reduce_scatter``, ``reduce_scatterv`` and ``combine``
    take."""
    moves: ClassVar[frozenset[str]] = MOVED
    """dtypes that all others take."""
    compares: bool = True
    """Whether ranks compare their calls before each one, so that calls that do not match are refused at every
    rank. Where that costs too much, a transport makes it an option."""

    def __init__(self, context: CommunicatorContext) -> None:
        self.context = context
        """What its factory was given."""
        self.cpu_group: Any = context.group
        """The ranks' :class:`~kvplug.StatelessGroup`."""
        self.device_group: Any = context.device_group
        """The group of the device's own library: the engine's, if it gave one, or a new one."""
        self.device = context.device
        """The device of this rank's tensors."""
        self.unique_name = context.unique_name
        """The context's."""
        self.rank_in_group: int = context.group.rank
        """This rank, counted in the group."""
        self.world_size: int = context.group.world_size
        """How many ranks the group has."""
        self.rank: int = self.rank_in_group
        """The same as ``rank_in_group``."""
        self.ranks: tuple[int, ...] = context.ranks or tuple(range(self.world_size))
        """The engine-wide ranks of the group's members."""
        if len(self.ranks) != self.world_size:
            raise ConfigError(
                f"a group of {self.world_size} ranks, and the global ranks of {len(self.ranks)}: {self.ranks}"
            )
        self.global_rank = self.ranks[self.rank_in_group]
        """This rank, counted in the engine."""
        self.global_world_size = context.global_world_size or max(self.ranks) + 1
        """How many ranks the engine has."""
        self.is_ep_communicator = bool(_EP.search(self.unique_name))
        """Whether it serves expert parallelism: its name contains the word "ep"."""
        self.use_all2all = self.is_ep_communicator and context.data_parallel_size > 1
        """Whether tokens of experts are exchanged: it serves expert parallelism, with several replicas."""
        self.all2all_backend = context.all2all_backend
        """The context's; empty: the default one."""
        self._busy = threading.Lock()
        self._broken = ""
        self._suspended = False
        self._destroyed = False
        close_after_fork(self)

    def __repr__(self) -> str:
        name = f" {self.unique_name!r}" if self.unique_name else ""
        state = (
            ", destroyed"
            if self._destroyed
            else ", broken"
            if self._broken
            else ", suspended"
            if self._suspended
            else ""
        )
        return f"<{type(self).__name__}{name}, rank {self.rank} of {self.world_size} on {self.device}{state}>"

    @property
    def destroyed(self) -> bool:
        """Whether ``destroy`` was called here."""
        return self._destroyed

    @property
    def suspended(self) -> bool:
        """Whether ``suspend`` was called here, and ``resume`` not yet."""
        return self._suspended

    def supports(self, device: str, dtype: torch.dtype | str, *, summing: bool = False) -> bool:
        """Whether tensors of ``dtype`` on ``device`` are accepted; ``summing``: by calls that sum them."""
        names = self.sums if summing else self.moves
        return device.partition(":")[0] in self.devices and dtype_name(dtype) in names

    # -- checks --------------------------------------------------------------------------------

    def _check_taken(self, tensor: Any, *, summing: bool = False) -> None:
        if not hasattr(tensor, "dtype") or not hasattr(tensor, "device"):
            raise UnsupportedError(f"a torch.Tensor is needed, not a {type(tensor).__qualname__}")
        layout = str(getattr(tensor, "layout", "no layout"))  # a NumPy array has dtype and device, too
        if layout != "torch.strided":
            raise UnsupportedError(
                f"a dense torch.Tensor is needed, not a {type(tensor).__qualname__} with {layout}"
            )
        self._check_dtype(tensor.dtype, str(tensor.device), summing=summing)

    def _check_dtype(self, dtype: Any, device: str, *, summing: bool) -> None:
        if not self._is_here(device) or not self.supports(device, dtype, summing=summing):
            taken = ", ".join(sorted(self.sums if summing else self.moves))
            raise UnsupportedError(
                f"a {dtype_name(dtype)} tensor on {device} was given; {self!r} takes, on"
                f" {self.device}{', to be summed' if summing else ''}: {taken}"
            )

    def _is_here(self, device: str) -> bool:
        """Of the same type; and the same one, where both say which."""
        kind, _, index = device.partition(":")
        our_kind, _, our_index = self.device.partition(":")
        return kind == our_kind and (not index or not our_index or index == our_index)

    def _check_rank(self, what: str, rank: int, *, other: bool = False) -> None:
        if type(rank) is not int or not 0 <= rank < self.world_size or (other and rank == self.rank_in_group):
            which = "another rank" if other else "a rank"
            raise ConfigError(
                f"{what}={rank!r} was given, and {which} of this group is wanted: 0 to"
                f" {self.world_size - 1}; this is rank {self.rank_in_group}"
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
                f"{self!r}: ranks may be in different calls since one failed ({self._broken}); make another"
            )

    def _after_fork_in_child(self) -> None:
        self._destroyed = True
