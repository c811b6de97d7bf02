"""The store of rank 0: keys, messages between ranks, and rounds in which all ranks take part.

Values are opaque bytes here. Values for particular ranks (messages, results of rounds) are kept until each of
them has confirmed receipt, or is gone, and then deleted: memory does not grow with the number of rounds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from kvplug.errors import (
    CapacityError,
    KvplugError,
    PeerGoneError,
    ResourceExhaustedError,
    TimeoutError,
    WireError,
)
from kvplug.net.deadline import Deadline
from kvplug.net.fork import close_after_fork
from kvplug.net.trust.identity import PeerIdentity
from kvplug.net.wire import values

MAX_KEY = 512
"""Characters of a key, or of the name of a round."""
MAX_BYTES = 1 << 30
"""Of all that the store holds, each value with ``_VALUE_BYTES`` more. Ranks exchange a few kilobytes."""
_VALUE_BYTES = 1024

# How an answer crosses to another rank, and what it becomes there.
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
    """How it left ("has left", "is gone"); empty while it takes part."""


@attrs.define
class _Round:
    contributions: dict[int, bytes] = attrs.field(factory=dict)
    collected: set[int] = attrs.field(factory=set)


class Store:
    """Thread-safe, in memory. ``answer`` serves requests; every wait ends when its rank or the store does."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._members: dict[int, _JoinedRank] = {}
        self._keys: dict[str, bytes] = {}
        self._mailbox: dict[tuple[str, int, int, int], bytes] = {}  # kind, sender, receiver, number
        self._rounds: dict[str, _Round] = {}
        self._nbytes = 0
        close_after_fork(self)

    @property
    def nbytes(self) -> int:
        """Bytes that count against the bound."""
        return self._nbytes

    @property
    def num_entries(self) -> int:
        """Keys, messages and rounds that are held."""
        return len(self._keys) + len(self._mailbox) + len(self._rounds)

    # -- members -------------------------------------------------------------------------------

    def join(self, rank: int, world_size: int, identity: PeerIdentity) -> None:
        """Raises WireError: that rank cannot join, and why."""
        with self._lock:
            if world_size != self._world_size:
                raise WireError(
                    f"world_size: rank {rank} ({identity}) says {world_size}, rank 0 says"
                    f" {self._world_size}; give all ranks the same"
                )
            if not 0 < rank < world_size:
                raise WireError(f"rank {rank} ({identity}) is not in 1..{world_size - 1}")
            if rank in self._members:
                holder = self._members[rank]
                state = holder.absent or "is here"
                raise WireError(
                    f"rank {rank} is taken: {holder.identity} {state}; {identity} needs another rank, or"
                    " a new group"
                )
            self._members[rank] = _JoinedRank(identity)
            self._changed.notify_all()

    def add_self(self, identity: PeerIdentity) -> None:
        """Rank 0 is a member too."""
        self._members[0] = _JoinedRank(identity)

    def is_member(self, rank: int, identity: PeerIdentity) -> bool:
        """Whether that very process is that rank, and still takes part."""
        member = self._members.get(rank)
        if member is None or member.absent:
            return False
        return attrs.evolve(member.identity, label="") == attrs.evolve(identity, label="")

    def part(self, rank: int, absent: str) -> None:
        """A rank "has left" or "is gone": ranks that wait for it get ``PeerGoneError``."""
        with self._lock:
            member = self._members.get(rank)
            if member is not None and not member.absent:
                member.absent = absent
                self._tidy()
                self._changed.notify_all()

    def name(self, rank: int) -> str:
        """ "rank 2 (decode, pid 12)", or what is known."""
        member = self._members.get(rank)
        return f"rank {rank} ({member.identity if member else 'never came'})"

    # -- requests ------------------------------------------------------------------------------

    def answer(self, rank: int, request: Any) -> tuple[str, Any]:
        """Answer ``request`` of ``rank``: ``(OK, value)`` or ``(key of ERRORS, message)``."""
        try:
            return OK, self._perform(rank, request)
        except KvplugError as e:
            for name, kind in ERRORS.items():
                if isinstance(e, kind):
                    return name, str(e)
            return "refused", str(e)

    def _perform(self, rank: int, request: Any) -> Any:
        match request:
            case ("set", str(key), bytes(data)):
                return self._set(key, data)
            case ("get", str(key), wait):
                return self._get(rank, key, _deadline(wait))
            case ("delete", str(key)):
                return self._delete(key)
            case ("add", str(key), int(amount)):
                return self._add(key, amount)
            case ("post", str(kind), int(number), [*receivers], bytes(data)) if _all_int(receivers):
                return self._post(kind, rank, number, receivers, data)
            case ("take", str(kind), int(number), int(sender), wait):
                return self._take(kind, sender, rank, number, _deadline(wait))
            case ("taken", str(kind), int(number), int(sender)):
                return self._taken((kind, sender, rank, number))
            case ("collect", str(name), bytes(data), wait):
                return self._collect(name, rank, data, _deadline(wait))
            case ("collected", str(name)):
                return self._collected(name, rank)
        raise WireError(f"{self.name(rank)} asked for something this store does not know; same kvplug?")

    def _set(self, key: str, data: bytes) -> None:
        _check_key(key)
        with self._lock:
            self._put(key, data)

    def _put(self, key: str, data: bytes) -> None:
        """With the lock."""
        self._count(len(data) - len(self._keys[key]) if key in self._keys else _cost(data))
        self._keys[key] = data
        self._changed.notify_all()

    def _count(self, nbytes: int) -> None:
        """With the lock: count what is to be held from now on, or no longer.

        Raises:
            CapacityError: it would be too much; it is not counted.
        """
        if nbytes > 0 and self._nbytes + nbytes > MAX_BYTES:
            raise CapacityError(
                f"the group's store holds {self._nbytes} bytes and has no room for {nbytes} more; delete keys"
                " that are not needed, and use transports for large data"
            )
        self._nbytes += nbytes

    def _get(self, rank: int, key: str, deadline: Deadline) -> bytes:
        _check_key(key)
        with self._lock:
            self._wait(rank, lambda: key in self._keys, deadline, lambda: f"no rank has set {key!r} in time")
            return self._keys[key]

    def _delete(self, key: str) -> bool:
        with self._lock:
            data = self._keys.pop(key, None)
            if data is None:
                return False
            self._count(-_cost(data))
            return True

    def _add(self, key: str, amount: int) -> int:
        _check_key(key)
        with self._lock:
            held = values.decode(self._keys[key]) if key in self._keys else 0
            if type(held) is not int:
                raise WireError(f"{key!r} holds no number to add to")
            self._put(key, values.encode(held + amount))
            return held + amount

    def _post(self, kind: str, sender: int, number: int, receivers: Iterable[int], data: bytes) -> None:
        _check_key(kind)
        with self._lock:
            here = self._here()
            slots = {(kind, sender, receiver, number) for receiver in receivers if receiver in here}
            for slot in slots - self._mailbox.keys():
                self._count(_cost(data))
                self._mailbox[slot] = data
            self._changed.notify_all()

    def _take(self, kind: str, sender: int, receiver: int, number: int, deadline: Deadline) -> bytes:
        key = (kind, sender, receiver, number)
        with self._lock:

            def arrived() -> bool:
                if key in self._mailbox:
                    return True
                self._refuse_absent([sender], "sent nothing")
                return False

            self._wait(receiver, arrived, deadline, lambda: f"{self.name(sender)} has sent nothing in time")
            return self._mailbox[key]

    def _taken(self, key: tuple[str, int, int, int]) -> None:
        with self._lock:
            self._drop_message(key)
            self._changed.notify_all()

    def _collect(self, name: str, rank: int, data: bytes, deadline: Deadline) -> list[bytes]:
        _check_key(name)
        with self._lock:
            this = self._rounds.get(name, _Round())
            if rank not in this.contributions:
                self._count(_cost(data))
                this.contributions[rank] = data
                self._rounds[name] = this
            self._changed.notify_all()

            def missing() -> list[int]:
                return [r for r in range(self._world_size) if r not in this.contributions]

            def complete() -> bool:
                absent = missing()
                self._refuse_absent(absent, f"was not in {name}")
                return not absent

            self._wait(
                rank,
                complete,
                deadline,
                lambda: f"{name}: still missing {', '.join(map(self.name, missing()))}",
            )
            return [this.contributions[r] for r in range(self._world_size)]

    def _collected(self, name: str, rank: int) -> None:
        with self._lock:
            this = self._rounds.get(name)
            if this is not None:
                this.collected.add(rank)
                self._tidy()
                self._changed.notify_all()

    # -- waiting and ending --------------------------------------------------------------------

    def _wait(
        self, rank: int, ready: Callable[[], bool], deadline: Deadline, what: Callable[[], str]
    ) -> None:
        """Wait until ``ready()``, which is called with the lock held."""
        while not ready():
            if self._closed:
                raise PeerGoneError(f"rank 0 has closed the group; until then, {what()}")
            if rank in self._members and self._members[rank].absent:
                raise PeerGoneError(f"{self.name(rank)} waits no longer")
            if deadline.expired:
                raise TimeoutError(what())
            self._changed.wait(deadline.remaining())

    def _refuse_absent(self, ranks: Iterable[int], what: str) -> None:
        for rank in ranks:
            member = self._members.get(rank)
            if member is not None and member.absent:
                raise PeerGoneError(f"{self.name(rank)} {member.absent} and {what}")

    def _tidy(self) -> None:
        """Drop values that no remaining rank will fetch."""
        here = self._here()
        for key in [key for key in self._mailbox if key[2] not in here]:
            self._drop_message(key)
        for name, this in list(self._rounds.items()):
            if self._complete(this) and not here - this.collected:
                del self._rounds[name]
                self._count(-sum(map(_cost, this.contributions.values())))

    def _drop_message(self, key: tuple[str, int, int, int]) -> None:
        data = self._mailbox.pop(key, None)
        if data is not None:
            self._count(-_cost(data))

    def _here(self) -> set[int]:
        return {rank for rank, member in self._members.items() if not member.absent}

    def _complete(self, this: _Round) -> bool:
        return len(this.contributions) == self._world_size

    def drain(self, deadline: Deadline) -> bool:
        """Rank 0 leaves. Wait until the remaining ranks have fetched everything that is ready for them."""
        self.part(0, "has left")
        with self._lock:
            while self._mailbox or any(map(self._complete, self._rounds.values())):
                if self._closed or deadline.expired or not self._here():
                    return False
                self._changed.wait(deadline.remaining())
            return True

    def close(self) -> None:
        """Requests that wait, and all later ones, raise ``PeerGoneError`` that says what was missing."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    def _after_fork_in_child(self) -> None:
        self._closed = True


def _all_int(ranks: Iterable[object]) -> bool:
    return all(type(rank) is int for rank in ranks)


def _cost(data: bytes) -> int:
    return len(data) + _VALUE_BYTES


def _check_key(key: str) -> None:
    if not 0 < len(key) <= MAX_KEY:
        raise WireError(f"a key, or the name of a round, has 1 to {MAX_KEY} characters, this one {len(key)}")


def _deadline(wait: object) -> Deadline:
    if wait is None or (isinstance(wait, int | float) and wait >= 0):
        return Deadline.after(wait)
    raise WireError("a rank asked to wait for what is no time")
