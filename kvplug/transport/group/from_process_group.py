"""A kvplug group of the ranks of another group, which carries the contact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvplug.errors import KvplugError, TransportError, WireError
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.peer_text import peer_text
from kvplug.net.trust.credentials import Credentials
from kvplug.net.trust.listener import Listener
from kvplug.transport.group.group import STORE_TIMEOUT_S, StatelessGroup
from kvplug.transport.queue.rendezvous import Rendezvous, rendezvous_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
        UnsupportedError: it is no process group, or has no CPU tensors.
        As ``StatelessGroup.create``.
    """
    rendezvous = rendezvous_of(process_group)
    deadline = Deadline.after(timeout, timeout_s)
    where: str | Listener
    if rendezvous.rank:
        where = _contact(rendezvous.broadcast(None, 0, deadline.remaining()))
    else:
        where = _listen(rendezvous, address, credentials, deadline)
    return StatelessGroup.create(
        where,
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        credentials=credentials,
        timeout=deadline.remaining(),
        timeout_s=timeout_s,
    )


def _listen(
    rendezvous: Rendezvous, address: str, credentials: Credentials | None, deadline: Deadline
) -> Listener:
    try:
        listener = StatelessGroup.listen(address, credentials)
    except KvplugError as e:
        rendezvous.broadcast({"failed": str(e)}, 0, deadline.remaining())
        raise
    try:
        rendezvous.broadcast({"contact": listener.contact}, 0, deadline.remaining())
    except BaseException:
        listener.close()
        raise
    return listener


def _contact(told: Any) -> str:
    match told:
        case {"contact": str(contact)}:
            return contact
        case {"failed": str(why)}:
            raise TransportError(f"rank 0 cannot listen for the other ranks: {peer_text(why)}")
    raise WireError("rank 0 did not say where it listens; same kvplug?")
