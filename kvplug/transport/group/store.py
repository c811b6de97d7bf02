"""The store of rank 0, which serves the other ranks. It holds keys, and the values that ranks exchange in
calls.

Values are opaque bytes here. A value for particular ranks is kept until each of them has confirmed it or is
gone, and is then deleted, so memory does not grow with the number of calls.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs

from kvplug.errors import (
    CapacityError,
    ClosedError,
    KvplugError,
    PeerGoneError,
    ResourceExhaustedError,
    TimeoutError,
    WireError,
)
from kvplug.net.deadline import Deadline
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.trust.channel import Channel
from kvplug.net.trust.connection import Connection
from kvplug.net.trust.identity import PeerIdentity
from kvplug.net.trust.listener import Listener
from kvplug.net.wire import values
from kvplug.transport.acceptor import Acceptor, hang_up

logger = logging.getLogger(__name__)

PURPOSE = "group"
"""The purpose of a group's listener."""
_ANSWER_TIMEOUT_S = 30.0
_LAST_ANSWERS_S = 1.0
_CONNECTIONS_PER_RANK = 256
"""The most connections per rank that are served at once, each in a thread. A rank has one connection for its
membership, and one for each of its threads that waits."""

MAX_KEY = 512
"""The most characters of a key, or of the name of a call."""
MAX_BYTES = 1 << 30
"""The most bytes that the store holds, counting ``_VALUE_BYTES`` more for each value. Ranks exchange a few
kilobytes."""
_VALUE_BYTES = 1024

# The status of an answer to another rank, and the error that it becomes there.
OK = "ok"
ERRORS: dict[str, type[KvplugError]] = {
    "timeout": TimeoutError,
    "gone": PeerGoneError,
    "large": CapacityError,
    "exhausted": ResourceExhaustedError,
    "refused": WireError,
}


@attrs.define
class _JoinedRank:
    identity: PeerIdentity
    absent: str = ""
    """How the rank left ("has left", "is gone"); empty while it takes part."""


@attrs.define
class _Given:
    """The value that one rank gave in one call."""

    data: bytes
    readers: set[int]
    """The ranks that have not confirmed the value."""
    by_all: bool
    """Whether every rank gives a value in this call and takes the values of all ranks."""


class Store:
    """A thread-safe store in memory. ``answer`` performs requests. A request that waits ends at the latest
    when its rank or the store ends.

    A rank's first connection is its membership. The rank joins over it and then only holds it open: when this
    connection ends (seen by pidfd, hang-up, or TCP's keep-alive probes), the rank has ended. Requests arrive
    over other connections.
    """

    def __init__(self, world_size: int, label: str = "", listener: Listener | None = None) -> None:
        """Serve the other ranks at ``listener``, which is taken over even if this raises.

        Raises:
            ResourceExhaustedError: the process can start no more threads, or has no free descriptor.
        """
        self._world_size = world_size
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._answered = threading.Condition(self._lock)
        self._answers = 0
        """How many requests of other ranks have no answer yet."""
        self._closed = False
        self._members: dict[int, _JoinedRank] = {}
        self._keys: dict[str, bytes] = {}
        self._given: dict[tuple[str, int, int], _Given] = {}
        """The values given in calls, by the name of the call, its number among the calls of that name, and
        the rank that gave the value."""
        self.nbytes = 0
        """Bytes that count against ``MAX_BYTES``."""
        self._acceptor: Acceptor[None] | None = None
        try:
            with NamedExhaustion("serving a group"):
                self._members[0] = _JoinedRank(PeerIdentity.of_this_process(label))
                if listener is not None:
                    self._acceptor = Acceptor(
                        [listener],
                        self._serve,
                        what="the group",
                        name="kvplug-group",
                        max_served=_CONNECTIONS_PER_RANK * world_size,
                        end=self._end,
                    )
        except BaseException:
            if listener is not None:
                listener.close()
            raise

    @property
    def num_entries(self) -> int:
        """How many keys, and values given in calls, the store holds."""
        return len(self._keys) + len(self._given)

    # -- members -------------------------------------------------------------------------------

    def join(self, rank: int, world_size: int, identity: PeerIdentity) -> None:
        """Add a member. Raises WireError if the rank cannot join, with the reason."""
        with self._lock:
            if world_size != self._world_size:
                raise WireError(
                    f"rank {rank} ({identity}) has world_size {world_size}, but rank 0 has"
                    f" {self._world_size}; give all ranks the same"
                )
            if not 0 < rank < world_size:
                raise WireError(f"rank {rank} ({identity}) is not in 1..{world_size - 1}")
            if rank in self._members:
                holder = self._members[rank]
                raise WireError(
                    f"rank {rank} is taken: {holder.identity} {holder.absent or 'is here'}; {identity} needs"
                    " another rank, or a new group"
                )
            self._members[rank] = _JoinedRank(identity)
            self._changed.notify_all()

    def is_member(self, rank: int, identity: PeerIdentity) -> bool:
        """Whether the process ``identity`` is that rank and still takes part."""
        member = self._members.get(rank)
        if member is None or member.absent:
            return False
        return attrs.evolve(member.identity, label="") == attrs.evolve(identity, label="")

    def part(self, rank: int, absent: str) -> None:
        """Record that a rank "has left" or "is gone". Ranks that wait for it get ``PeerGoneError``."""
        with self._lock:
            member = self._members.get(rank)
            if member is not None and not member.absent:
                member.absent = absent
                self._confirm(rank, list(self._given))
                self._changed.notify_all()

    def name(self, rank: int) -> str:
        """Return a name for messages, such as "rank 2 (decode, pid 12)" or "rank 2 (never came)"."""
        member = self._members.get(rank)
        return f"rank {rank} ({member.identity if member else 'never came'})"

    def _absent(self, rank: int) -> str:
        member = self._members.get(rank)
        return member.absent if member is not None else ""

    # -- serving ---------------------------------------------------------------------------------

    def _serve(self, connection: Connection) -> None:
        with Channel(connection, timeout_s=_ANSWER_TIMEOUT_S) as channel:
            try:
                match channel.recv():
                    case ("join", int(rank), int(world_size)):
                        self._membership(channel, rank, world_size)
                    case ("ask", int(rank)):
                        self._requests(channel, rank)
                    case _:
                        raise WireError("the first message must be 'join' or 'ask'")
            except (ClosedError, PeerGoneError):
                pass
            except KvplugError as e:
                logger.warning("a connection of %s to the group ends: %s", channel.peer, e)

    def _membership(self, channel: Channel, rank: int, world_size: int) -> None:
        try:
            self.join(rank, world_size, channel.peer)
        except WireError as e:
            channel.send(("refused", str(e)))
            return
        absent = "is gone"
        try:
            channel.send((OK, None))
            if channel.recv(None) == ("leave",):
                absent = "has left"
        finally:
            self.part(rank, absent)

    def _requests(self, channel: Channel, rank: int) -> None:
        if not self.is_member(rank, channel.peer):
            channel.send(("refused", f"{channel.peer} is not rank {rank} of this group"))
            return
        channel.send((OK, None))
        while True:
            request = channel.recv(None)
            with self._lock:
                self._answers += 1
            try:
                answer = self.answer(rank, request)
                if type(request) is tuple and request[:1] == ("taken",):
                    continue
                try:
                    channel.send(answer)
                except CapacityError as e:
                    channel.send(("large", f"the answer is too large: {e}"))
            finally:
                with self._lock:
                    self._answers -= 1
                    self._answered.notify_all()

    # -- requests ------------------------------------------------------------------------------

    def answer(self, rank: int, request: Any) -> tuple[str, Any]:
        """Answer ``request`` of ``rank``: ``(OK, value)`` or ``(key of ERRORS, message)``."""
        try:
            with self._lock:
                return OK, self._perform(rank, request)
        except KvplugError as e:
            return next((name for name, kind in ERRORS.items() if isinstance(e, kind)), "refused"), str(e)

    def ask(self, request: tuple[Any, ...]) -> tuple[str, Any]:
        """Answer a request of rank 0 itself."""
        return self.answer(0, request)

    send = ask
    """The same, for a request that has no answer."""

    def _perform(self, rank: int, request: Any) -> Any:
        match request:
            case ("set", str(key), bytes(data)):
                return self._set(key, data)
            case ("get", str(key), wait):
                return self._get(rank, key, _deadline(wait))
            case ("delete", str(key)):
                found = self._keys.pop(key, None)
                self._count(0 if found is None else -_cost(found))
                return found is not None
            case ("add", str(key), int(amount)):
                return self._add(key, amount)
            case ("exchange", str(call), int(number), [*readers], bytes(data), [*senders], wait) if _all_int(
                readers, senders
            ):
                deadline = _deadline(wait)
                self._give(call, number, rank, readers, data)
                return self._take(call, number, rank, senders, deadline)
            case ("taken", str(call), int(number), [*senders]) if _all_int(senders):
                self._confirm(rank, [(call, number, sender) for sender in senders])
                return self._changed.notify_all()
        raise WireError(
            f"{self.name(rank)} sent a request that this store does not know; do both use the same kvplug?"
        )

    def _set(self, key: str, data: bytes) -> None:
        _check_key(key)
        self._count(len(data) - len(self._keys[key]) if key in self._keys else _cost(data))
        self._keys[key] = data
        self._changed.notify_all()

    def _get(self, rank: int, key: str, deadline: Deadline) -> bytes:
        _check_key(key)
        self._wait(rank, lambda: key in self._keys, deadline, lambda: f"no rank has set {key!r} in time")
        return self._keys[key]

    def _add(self, key: str, amount: int) -> int:
        held = values.decode(self._keys[key]) if key in self._keys else 0
        if type(held) is not int:
            raise WireError(f"{key!r} does not hold a number, so nothing can be added to it")
        self._set(key, values.encode(held + amount))
        return held + amount

    def _give(self, call: str, number: int, sender: int, readers: Sequence[int], data: bytes) -> None:
        """Keep ``data`` for ``readers``, unless this call has been made before."""
        _check_key(call)
        here = {rank for rank in readers if 0 <= rank < self._world_size and not self._absent(rank)}
        if here and (call, number, sender) not in self._given:
            self._count(_cost(data))
            self._given[call, number, sender] = _Given(data, here, by_all=sender in readers)
            self._changed.notify_all()

    def _take(
        self, call: str, number: int, rank: int, senders: Sequence[int], deadline: Deadline
    ) -> list[bytes]:
        """Wait until all ``senders`` have given their values in a call, and return the values."""

        def missing() -> list[int]:
            return [sender for sender in senders if (call, number, sender) not in self._given]

        def complete() -> bool:
            absent = missing()
            for sender in absent:
                if how := self._absent(sender):
                    raise PeerGoneError(f"{self.name(sender)} {how} without taking part in {call} {number}")
            return not absent

        self._wait(
            rank,
            complete,
            deadline,
            lambda: f"{call} {number}: still missing {', '.join(map(self.name, missing()))}",
        )
        return [self._given[call, number, sender].data for sender in senders]

    def _confirm(self, rank: int, given: Iterable[tuple[str, int, int]]) -> None:
        """Record that ``rank`` does not need these values any more."""
        for key in given:
            found = self._given.get(key)
            if found is not None:
                found.readers.discard(rank)
                if not found.readers:
                    del self._given[key]
                    self._count(-_cost(found.data))

    def _count(self, nbytes: int) -> None:
        """Add ``nbytes``, which may be negative, to the bytes that the store holds.

        Raises:
            CapacityError: the store would hold more than ``MAX_BYTES``; nothing was added.
        """
        if nbytes > 0 and self.nbytes + nbytes > MAX_BYTES:
            raise CapacityError(
                f"the group's store holds {self.nbytes} bytes and has no room for {nbytes} more; delete"
                " unused keys, and use transports for large data"
            )
        self.nbytes += nbytes

    # -- waiting and ending --------------------------------------------------------------------

    def _wait(
        self, rank: int, ready: Callable[[], bool], deadline: Deadline, what: Callable[[], str]
    ) -> None:
        """Wait until ``ready()``."""
        while not ready():
            if self._closed:
                raise PeerGoneError(f"rank 0 has closed the group; until then, {what()}")
            if self._absent(rank):
                raise PeerGoneError(f"{self.name(rank)} no longer waits")
            if deadline.expired:
                raise TimeoutError(what())
            self._changed.wait(deadline.remaining())

    def drain(self, deadline: Deadline) -> bool:
        """Record that rank 0 leaves, and wait until the other ranks have fetched everything that is ready.

        Return False if the deadline passes, the store closes or all ranks leave first.
        """
        self.part(0, "has left")
        with self._lock:
            while any(map(self._is_ready, self._given)):
                if self._closed or deadline.expired or all(map(self._absent, self._members)):
                    return False
                self._changed.wait(deadline.remaining())
            return True

    def _is_ready(self, key: tuple[str, int, int]) -> bool:
        call, number, _ = key
        ranks = range(self._world_size) if self._given[key].by_all else ()
        return all((call, number, rank) in self._given for rank in ranks)

    def close(self, deadline: Deadline) -> None:
        """Wait until the other ranks have fetched their values, at most until the deadline. Then end all
        requests with ``PeerGoneError``, which names what was missing, and all connections."""
        self.drain(deadline)
        self._refuse()
        with self._lock:
            # Ranks that were waiting now receive the reason.
            self._answered.wait_for(lambda: not self._answers, _LAST_ANSWERS_S)
        if self._acceptor is not None:
            self._acceptor.close()

    def _refuse(self) -> None:
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    def _end(self, connection: Connection) -> None:
        """End the thread of a connection, even if it waits for another rank."""
        self._refuse()
        hang_up(connection)


def _all_int(*lists: Iterable[object]) -> bool:
    return all(type(rank) is int for ranks in lists for rank in ranks)


def _cost(data: bytes) -> int:
    return len(data) + _VALUE_BYTES


def _check_key(key: str) -> None:
    if not 0 < len(key) <= MAX_KEY:
        raise WireError(f"a key or the name of a call must have 1 to {MAX_KEY} characters, not {len(key)}")


def _deadline(wait: object) -> Deadline:
    if wait is None or (isinstance(wait, int | float) and wait >= 0):
        return Deadline.after(wait)
    raise WireError("a rank sent a timeout that is not a number of seconds")
