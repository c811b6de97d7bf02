"""The group, which carries small messages between ranks before and beside the transports."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeVar

from kvplug.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    TransportError,
    UnsupportedError,
    WireError,
)
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.exclusive_use import ExclusiveUse
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.fork import close_after_fork
from kvplug.net.peer_text import peer_text
from kvplug.net.trust.credentials import Credentials
from kvplug.net.trust.listener import Listener
from kvplug.net.wire import Limits, decode, encode
from kvplug.transport.group.remote import RemoteStore
from kvplug.transport.group.store import ERRORS, OK, PURPOSE, Store

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

STORE_TIMEOUT_S = 300.0
"""The default timeout of a group's calls."""
_CLOSE_TIMEOUT_S = 5.0
_CONTACT_LIMITS: Final = Limits(max_bytes=1 << 16)
"""Limits a message that holds a contact, or the reason why a rank cannot listen. It is checked before memory
is allocated."""


class _Listening(Protocol):
    @property
    def contact(self) -> str: ...

    def close(self) -> object: ...


_L = TypeVar("_L", bound=_Listening)


class StatelessGroup:
    """Ranks ``0 .. world_size - 1`` that exchange small plain values (16 MiB at most, pickle-free).

    Only rank 0 keeps the store, at one address. Each other rank has one connection to it, and one more for
    each request under way.

    Law. Every wait ends: with its result, with a ``TimeoutError`` that names the ranks it waited for, or with
    a ``PeerGoneError`` when a rank it needs has ended or left. When rank 0 ends, the group ends. A value sent
    to a rank is kept until that rank has received it, and is then deleted.

    Callers. Any thread may call ``set``, ``get``, ``delete`` and ``add``. All ranks must call the collectives
    (``barrier``, ``broadcast``, ``all_gather``) in the same order, from one thread at a time, else
    ``BusyError``; the same holds for ``send`` to one rank and ``recv`` from one rank. After a
    ``TimeoutError`` the same call resumes where it stopped, with the arguments of the first attempt.

    Not promised. Throughput: everything passes through rank 0. Transports are for large data.
    """

    def __init__(
        self,
        access: Store | RemoteStore,
        rank: int,
        world_size: int,
        timeout_s: float | None,
        listener: Listener | None,
    ) -> None:
        self._access = access
        self.rank = rank
        """This process's rank."""
        self.world_size = world_size
        """How many ranks the group has."""
        self._timeout_s = timeout_s
        self._listener = listener
        self._closed = False
        self._collective = ExclusiveUse("in a collective of this group")
        self._sending = [ExclusiveUse(f"sending to rank {rank}") for rank in range(world_size)]
        self._receiving = [ExclusiveUse(f"receiving from rank {rank}") for rank in range(world_size)]
        self._numbers: defaultdict[str, int] = defaultdict(int)
        self._all = list(range(world_size))
        close_after_fork(self)

    def __repr__(self) -> str:
        return f"<StatelessGroup, rank {self.rank} of {self.world_size}{', closed' if self._closed else ''}>"

    @classmethod
    def listen(cls, address: str, credentials: Credentials | None = None, *, label: str = "") -> Listener:
        """Listen at rank 0, to know the contact before the group exists. Pass the listener to :meth:`create`.

        Raises as ``Listener.open``.
        """
        return Listener.open(address, credentials or Credentials(), PURPOSE, label=label)

    @classmethod
    def create(
        cls,
        address: str | Listener,
        *,
        rank: int,
        world_size: int,
        credentials: Credentials | None = None,
        timeout: Timeout = DEFAULT_TIMEOUT,
        timeout_s: float | None = STORE_TIMEOUT_S,
        label: str = "",
    ) -> StatelessGroup:
        """Connect all ranks through ``address``. Return when all have joined.

        Rank 0 listens there, or takes over the listener that it is given, even if this raises. The other
        ranks dial rank 0 repeatedly until it listens. ``timeout`` limits this call (default: ``timeout_s``);
        ``timeout_s`` is the default timeout of later calls. ``label`` names this process in the messages of
        other ranks.

        Raises:
            TimeoutError: names the ranks that did not join, or the address where no process listened.
            InsecureAddressError, AddressInUseError, AuthenticationError, ConfigError: listening or dialling
                failed.
            WireError: rank or world size do not fit the group.
        """
        if not 0 <= rank < world_size:
            raise ConfigError(
                f"rank must be in 0..{world_size - 1} for a world size of {world_size}, got {rank}"
            )
        credentials = credentials or Credentials()
        deadline = Deadline.after(timeout, timeout_s)
        label = label or f"rank {rank}"
        listener: Listener | None = None
        access: Store | RemoteStore
        if rank == 0:
            if isinstance(address, Listener):
                listener = address
            elif world_size > 1:
                listener = cls.listen(address, credentials, label=label)
            access = Store(world_size, label, listener)
        elif isinstance(address, Listener):
            raise ConfigError(f"rank {rank} dials rank 0: give it the contact, not a listener")
        else:
            access = RemoteStore(address, credentials, rank, world_size, label, deadline, timeout_s)
        group = cls(access, rank, world_size, timeout_s, listener)
        try:
            group._exchange("meeting", group._all, None, group._all, deadline)
        except BaseException:
            group.close(0)
            raise
        return group

    @classmethod
    def from_process_group(
        cls,
        process_group: ProcessGroup | StatelessGroup,
        address: str = "unix:",
        *,
        credentials: Credentials | None = None,
        timeout: Timeout = DEFAULT_TIMEOUT,
        timeout_s: float | None = STORE_TIMEOUT_S,
    ) -> StatelessGroup:
        """Make a kvplug group of the ranks of a torch process group. The caller closes both groups.

        All ranks call this. Rank 0 listens at ``address`` (``unix:`` for ranks on one host). The process
        group, which needs CPU tensors, carries the contact to the other ranks, and limits that step by its
        own timeout. The rest is as in :meth:`create`. The process group is not used afterwards.

        Raises:
            TransportError: at the other ranks, if rank 0 cannot listen; the error says why. Or a collective
                of the process group failed.
            WireError: rank 0 sent something other than its contact.
            UnsupportedError: ``process_group`` is not a torch process group, or cannot move CPU tensors.
            The rest as :meth:`create`.
        """
        ranks = process_group if isinstance(process_group, StatelessGroup) else _TorchRanks(process_group)
        deadline = Deadline.after(timeout, timeout_s)
        where: str | Listener
        if ranks.rank == 0:
            where = listen_and_send(
                lambda: cls.listen(address, credentials),
                lambda message: ranks.broadcast(message, 0, deadline.remaining()),
            )
        else:
            where = contact_in(ranks.broadcast(None, 0, deadline.remaining()), 0)
        return cls.create(
            where,
            rank=ranks.rank,
            world_size=ranks.world_size,
            credentials=credentials,
            timeout=deadline.remaining(),
            timeout_s=timeout_s,
        )

    @property
    def contact(self) -> str:
        """On rank 0, the contact that the others dial. Empty on other ranks."""
        return self._listener.contact if self._listener is not None else ""

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called here, or this is a forked child."""
        return self._closed

    # -- keys ----------------------------------------------------------------------------------

    def set(self, key: str, value: object) -> None:
        """Set a key of the group. It stays until it is deleted.

        Raises:
            UnsupportedError, CapacityError: groups cannot carry the value.
            PeerGoneError, TimeoutError, ClosedError: as the law says.
        """
        self._ask("set", key, encode(value))

    def get(self, key: str, timeout: Timeout = DEFAULT_TIMEOUT) -> Any:
        """Return the value of a key. Wait until a rank has set it.

        Raises:
            TimeoutError: no rank has set the key in time.
            PeerGoneError, ClosedError: as the law says.
        """
        return _decoded(self._ask("get", key, self._deadline(timeout).remaining()))

    def delete(self, key: str) -> bool:
        """Delete a key. Return whether it existed."""
        return _checked(self._ask("delete", key), bool)  # type: ignore[no-any-return]

    def add(self, key: str, amount: int = 1) -> int:
        """Add ``amount`` to a key's number atomically, and return the sum. A missing key counts as 0."""
        return _checked(self._ask("add", key, amount), int)  # type: ignore[no-any-return]

    # -- collectives ---------------------------------------------------------------------------

    def barrier(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Wait until all ranks have called this.

        Raises:
            TimeoutError: names the ranks that have not called it.
            PeerGoneError: a rank that has not called it has ended or left.
        """
        with self._collective.taken():
            self._exchange("barrier", self._all, None, self._all, self._deadline(timeout))

    def all_gather(self, value: object, timeout: Timeout = DEFAULT_TIMEOUT) -> list[Any]:
        """Return the values of all ranks, in the order of ranks. Raises as :meth:`barrier`."""
        with self._collective.taken():
            return self._exchange("all_gather", self._all, value, self._all, self._deadline(timeout))

    def broadcast(self, value: object, src: int, timeout: Timeout = DEFAULT_TIMEOUT) -> Any:
        """Return the value of rank ``src``. The values of other ranks are ignored. ``src`` does not wait.

        Raises:
            TimeoutError: ``src`` has not called this in time.
            PeerGoneError: ``src`` has ended or left without calling it.
        """
        self._check_rank(src)
        call = f"broadcast from rank {src}, number"
        with self._collective.taken():
            if src == self.rank:
                others = [rank for rank in self._all if rank != src]
                self._exchange(call, others, value, (), self._deadline(DEFAULT_TIMEOUT))
                return value
            return self._exchange(call, (), None, [src], self._deadline(timeout))[0]

    # -- messages between ranks -----------------------------------------------------------------------

    def send(self, value: object, dst: int) -> None:
        """Send a value to another rank, without waiting until it is received.

        Raises:
            UnsupportedError, CapacityError: groups cannot carry the value.
            PeerGoneError, TimeoutError, ClosedError: rank 0 cannot take the value.
        """
        self._check_rank(dst, other=True)
        self._check_open()
        with self._sending[dst].taken():
            call = f"message from rank {self.rank} to rank {dst}, number"
            self._exchange(call, [dst], value, (), self._deadline(DEFAULT_TIMEOUT))

    def recv(self, src: int, timeout: Timeout = DEFAULT_TIMEOUT) -> Any:
        """Receive the next value from rank ``src``, in order.

        Raises:
            TimeoutError: ``src`` has sent nothing in time.
            PeerGoneError: ``src`` is gone, and all its values were received.
        """
        self._check_rank(src, other=True)
        self._check_open()
        with self._receiving[src].taken():
            call = f"message from rank {src} to rank {self.rank}, number"
            return self._exchange(call, (), None, [src], self._deadline(timeout))[0]

    # -- internals -----------------------------------------------------------------------------

    def _exchange(
        self, call: str, readers: Sequence[int], value: object, senders: Sequence[int], deadline: Deadline
    ) -> list[Any]:
        """Give ``value`` to ``readers``, and wait for the values of ``senders`` in the same call.

        Ranks number the calls of each name. A call that fails is not counted, so the next one resumes it.
        """
        number = self._numbers[call]
        data = encode(value)
        try:
            found = self._ask("exchange", call, number, readers, data, senders, deadline.remaining())
        except CapacityError:
            if senders:  # all have given their values, but together these do not fit into an answer
                self._taken(call, number, senders)
            raise
        self._taken(call, number, senders)
        if len(_checked(found, list)) != len(senders):
            raise WireError(f"rank 0 sent the values of {len(found)} ranks instead of {len(senders)}")
        return [_decoded(each) for each in found]

    def _taken(self, call: str, number: int, senders: Sequence[int]) -> None:
        self._numbers[call] = number + 1
        if senders:
            self._access.send(("taken", call, number, list(senders)))

    def _ask(self, *request: Any) -> Any:
        self._check_open()
        status, answer = self._access.ask(request)
        if status == OK:
            return answer
        if self._closed:
            raise ClosedError("the group was closed during the call")
        raise ERRORS.get(status, WireError)(peer_text(answer))

    def _check_open(self) -> None:
        # Checked before ``ExclusiveUse``: in a forked child, a thread of the parent may seem to be inside the
        # call.
        if self._closed:
            raise ClosedError("the group is closed")

    def _deadline(self, timeout: Timeout) -> Deadline:
        return Deadline.after(timeout, self._timeout_s)

    def _check_rank(self, rank: int, *, other: bool = False) -> None:
        if not 0 <= rank < self.world_size or (other and rank == self.rank):
            which = "another rank" if other else "a rank"
            raise ConfigError(
                f"expected {which} in 0..{self.world_size - 1}, got {rank} (this is {self.rank})"
            )

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Leave the group. Idempotent. Rank 0 first waits (by default 5 s at most) until the other ranks have
        fetched their values.

        Ranks that wait for this one get ``PeerGoneError``. After rank 0 closes, every call of the other ranks
        raises that error. Ranks that end together should call ``barrier`` first.
        """
        deadline = Deadline.after(timeout, _CLOSE_TIMEOUT_S)
        if self._closed:
            return
        self._closed = True
        self._access.close(deadline)

    def abort(self) -> None:
        """Leave at once."""
        self.close(0)

    def _after_fork_in_child(self) -> None:
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


def _checked(answer: Any, kind: type) -> Any:
    """Return ``answer``. Raises WireError if it is not of type ``kind``."""
    if type(answer) is not kind:
        raise WireError(
            f"rank 0 answered with a {type(answer).__name__}, not a {kind.__name__}; do both use the same"
            " kvplug?"
        )
    return answer


def _decoded(answer: Any) -> Any:
    return decode(_checked(answer, bytes))


def listen_and_send(listen: Callable[[], _L], send: Callable[[object], object]) -> _L:
    """Listen, and send the contact, or the reason for a failure, to ranks that read it with
    :func:`contact_in`.

    Raises as ``listen`` and ``send``.
    """
    try:
        listener = listen()
    except Exception as e:
        send(("failed", str(e)[:10_000]))
        raise
    try:
        send(("contact", listener.contact))
    except BaseException:
        listener.close()
        raise
    return listener


def contact_in(message: object, rank: int) -> str:
    """Return the contact in a message of ``rank``. The message may be any value.

    Raises:
        TransportError: the rank could not listen; the error says why.
        WireError: the rank sent something other than its contact.
    """
    match message:
        case ("contact", str(contact)):
            return contact
        case ("failed", str(why)):
            raise TransportError(f"rank {rank} cannot listen: {peer_text(why)}")
    raise WireError(f"rank {rank} did not send its contact; do both use the same kvplug?")


class _TorchRanks:
    """The ranks of a torch process group. Values travel as bytes in CPU tensors, their length first."""

    def __init__(self, group: Any) -> None:
        """Raises UnsupportedError if the group cannot move CPU tensors or does not include this process."""
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
                f"the process group ({backends}) cannot move CPU tensors, which carry the contact: use a CPU"
                ' group, such as torch.distributed.new_group(backend="gloo")'
            )
        self._group = group

    def broadcast(self, value: object, src: int, timeout: Timeout = DEFAULT_TIMEOUT) -> Any:
        """Return the value of rank ``src``. The process group's own timeout applies, not ``timeout``.

        Raises:
            TransportError: the collective failed; the error gives torch's reason.
            WireError: the bytes that arrived are not a value.
        """
        import torch
        import torch.distributed as dist

        most = _CONTACT_LIMITS.max_bytes
        data = encode(value, limits=_CONTACT_LIMITS) if self.rank == src else b""
        # Torch also raises these if a peer is gone or late.
        errors = (RuntimeError, ValueError, MemoryError)
        with NamedExhaustion("a collective of the process group failed", TransportError, errors):
            root = dist.get_global_rank(self._group, src)
            length = torch.tensor([len(data)], device="cpu")
            dist.broadcast(length, root, self._group)
            nbytes = int(length)
            if not 0 < nbytes <= most:
                raise WireError(f"{nbytes} bytes were announced, but {most} are the most allowed")
            content = torch.tensor(list(data.ljust(nbytes, b"\0")), dtype=torch.uint8, device="cpu")
            dist.broadcast(content, root, self._group)
        return value if self.rank == src else decode(bytes(content.tolist()), limits=_CONTACT_LIMITS)
