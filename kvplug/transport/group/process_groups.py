"""A kvplug group of the ranks of another group, which carries the contact."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from kvplug.errors import KvplugError, TransportError, UnsupportedError, WireError
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.exhaustion import raise_if_exhausted
from kvplug.net.peer_text import peer_text
from kvplug.net.trust.credentials import Credentials
from kvplug.net.trust.listener import Listener
from kvplug.net.wire import Limits, decode, encode
from kvplug.transport.group.group import STORE_TIMEOUT_S, StatelessGroup

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LIMITS: Final = Limits(max_bytes=1 << 16)
"""Of the contact, or of the reason why there is none; compared before anything is allocated."""


def group_from_process_group(
    process_group: ProcessGroup | StatelessGroup,
    address: str = "unix:",
    *,
    credentials: Credentials | None = None,
    timeout: Timeout = DEFAULT_TIMEOUT,
    timeout_s: float | None = STORE_TIMEOUT_S,
) -> StatelessGroup:
    """Make a kvplug group of the ranks of a torch process group. The caller closes both groups.

    All ranks call it. Rank 0 listens at ``address`` (``unix:`` for ranks on one host), and the process group,
    which needs CPU tensors, carries its contact to the others; how long that takes is the process group's own
    timeout. The rest is as in :meth:`StatelessGroup.create`. The process group is not used afterwards.

    Raises:
        TransportError: rank 0 cannot listen, and why: at the other ranks. Or a collective of the process
            group failed.
        WireError: rank 0 sent something else than its contact.
        UnsupportedError: it is no process group, or has no CPU tensors.
        As ``StatelessGroup.create``.
    """
    ranks = process_group if isinstance(process_group, StatelessGroup) else _TorchRanks(process_group)
    deadline = Deadline.after(timeout, timeout_s)
    where: str | Listener
    if ranks.rank == 0:
        try:
            where = StatelessGroup.listen(address, credentials)
        except KvplugError as e:
            ranks.broadcast(("failed", str(e)[:10_000]), 0, deadline.remaining())
            raise
        try:
            ranks.broadcast(("contact", where.contact), 0, deadline.remaining())
        except BaseException:
            where.close()
            raise
    else:
        match ranks.broadcast(None, 0, deadline.remaining()):
            case ("contact", str(where)):
                pass
            case ("failed", str(why)):
                raise TransportError(f"rank 0 cannot listen for the other ranks: {peer_text(why)}")
            case _:
                raise WireError("rank 0 did not say where it listens; same kvplug?")
    return StatelessGroup.create(
        where,
        rank=ranks.rank,
        world_size=ranks.world_size,
        credentials=credentials,
        timeout=deadline.remaining(),
        timeout_s=timeout_s,
    )


class _TorchRanks:
    """The ranks of a torch process group. Values travel as bytes in CPU tensors, their length first."""

    def __init__(self, group: Any) -> None:
        """Raises UnsupportedError: it has no CPU tensors, or this process has no part in it."""
        torch_group = getattr(sys.modules.get("torch.distributed"), "ProcessGroup", None)
        if torch_group is None or not isinstance(group, torch_group):
            raise UnsupportedError(
                "a kvplug.StatelessGroup or a torch.distributed.ProcessGroup is needed,"
                f" not a {type(group).__qualname__}"
            )
        import torch.distributed as dist

        try:
            backends = str(dist.get_backend_config(group))
            self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        except (RuntimeError, TypeError, ValueError) as e:
            raise UnsupportedError(f"torch.distributed does not know this process group: {e}") from e
        if self.rank < 0:
            raise UnsupportedError("this process is not in the process group")
        if not any(backend.startswith("cpu:") for backend in backends.split(",")):
            raise UnsupportedError(
                f"the process group ({backends}) has no CPU tensors, in which a contact travels: give a CPU"
                ' group, as torch.distributed.new_group(backend="gloo") makes it'
            )
        self._group = group

    def broadcast(self, value: object, src: int, timeout: Timeout = DEFAULT_TIMEOUT) -> Any:
        """The value that rank ``src`` gave. The process group decides how long it waits, not ``timeout``.

        Raises:
            TransportError: the collective failed; says torch's reason.
            WireError: what came is no value.
        """
        import torch
        import torch.distributed as dist

        data = encode(value, limits=_LIMITS) if self.rank == src else b""
        try:
            root = dist.get_global_rank(self._group, src)
            length = torch.tensor([len(data)], device="cpu")
            dist.broadcast(length, root, self._group)
            nbytes = int(length)
            if not 0 < nbytes <= _LIMITS.max_bytes:
                raise WireError(f"{nbytes} bytes were announced, and {_LIMITS.max_bytes} are the most")
            content = torch.tensor(list(data.ljust(nbytes, b"\0")), dtype=torch.uint8, device="cpu")
            dist.broadcast(content, root, self._group)
        except (
            RuntimeError,
            ValueError,
            MemoryError,
        ) as e:  # also if a peer is gone or late
            if isinstance(e, KvplugError):
                raise
            raise_if_exhausted(e, "a collective of the process group")
            raise TransportError(f"a collective of the process group failed: {e}") from e
        return value if self.rank == src else decode(bytes(content.tolist()), limits=_LIMITS)
