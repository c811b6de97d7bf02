"""The store "memory": pages in a dict of this process. Its ends share it by a path, or reach it by a link."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvplug import CapacityError, ClosedError, PeerGoneError, UnsupportedError
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    BlockingStore,
    Deadline,
    ExecutedStore,
    Job,
    PageEvent,
    Presence,
    Series,
    StoreContext,
    StoreLink,
    Timeout,
    Usage,
    WireError,
)
from kvplug_testing.memory.page_place import PagePlace

_FOR_EVER_S = 1e8

_places: dict[str, PagePlace] = {}
"""By path, as long as an end is open."""
_entering = threading.Lock()


class PlaceEnd(BlockingStore):
    """The pages of one place, for one end."""

    is_shared = False  # other processes do not see them
    place_type: type[PagePlace] = PagePlace

    def __init__(self, path: str, budget_bytes: int) -> None:
        self._path = path
        with _entering:
            self.place = _places.get(path) or self.place_type(budget_bytes)
            if path:
                _places[path] = self.place
            self.number = self.place.enter()

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        found = self.place.lookup(self.number, keys, 0.0)
        return [presence is Presence.HELD for presence in found]

    def read(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        page = self.place.read(key, self.number)
        return None if page is None else fill(into, page)

    def write(self, key: bytes, page: Sequence[memoryview]) -> bool:
        return self.place.write(key, b"".join(page))

    def remove(self, keys: Sequence[bytes]) -> None:
        self.place.remove(keys)

    def clear(self) -> None:
        self.place.clear()

    def keys(self, series: bytes) -> list[bytes]:
        return self.place.keys(series)

    def touch(self, keys: Sequence[bytes]) -> None:
        self.place.touch(keys)

    def usage(self) -> Usage:
        return self.place.usage()

    def close(self) -> None:
        with _entering:
            self.place.leave(self.number)
            if not self.place.ends and _places.get(self._path) is self.place:
                del _places[self._path]


class MemoryStore(ExecutedStore):
    """One end. Pages move in threads of the executor; everything else is answered at once."""

    end_type: type[PlaceEnd] = PlaceEnd

    def __init__(self, context: StoreContext) -> None:
        path = context.options.path if context.options is not None else ""
        self._inner = self.end_type(path, context.buffer_size)
        self._links: set[StoreLink] = set()
        super().__init__(self._inner, name="memory", seal=context.seal, timeout_s=context.timeout_s)

    @property
    def place(self) -> PagePlace:
        """The pages, which all ends share."""
        return self._inner.place

    def submit_lookup(
        self, keys: Sequence[bytes], *, lease_s: float = 0.0, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> Job[Presence]:
        job: Job[Presence] = Job(len(keys), self._deadline(timeout))
        self._check_open()
        found = self.place.lookup(self._inner.number, keys, lease_s)
        held = [each is Presence.HELD for each in found]
        for index, is_readable in enumerate(self._calls.readable(keys, held)):
            if found[index] is Presence.HELD and not is_readable:
                found[index] = Presence.ABSENT
        job.set(found)
        return job

    def declare(self, series: Series, keys: Sequence[bytes], *, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        for_s = self._deadline(timeout).remaining()
        self._check_open()
        self.place.declare(self._inner.number, series.id, keys, _FOR_EVER_S if for_s is None else for_s)

    def withdraw(self, keys: Sequence[bytes]) -> None:
        self._check_open()
        self.place.withdraw(self._inner.number, keys)

    def release(self, keys: Sequence[bytes]) -> None:
        self._check_open()
        self.place.release(self._inner.number, keys)

    def expect_reader(self, keys: Sequence[bytes]) -> None:
        self._check_open()
        self.place.expect_reader(self._inner.number, keys)

    @property
    def has_events(self) -> bool:
        return True

    def subscribe(self, listener: Callable[[PageEvent], None]) -> Callable[[], None]:
        self._check_open()
        return self.place.subscribe(listener)

    # -- for other processes -------------------------------------------------------------------

    def serve(self, link: StoreLink) -> None:
        with self._lock:
            self._check_open()
            self._links.add(link)
        calls: dict[str, Callable[..., Any]] = {
            "has": self._inner.has,
            "read": self.place.read,
            "write": self._write_for_peer,
            "remove": self.place.remove,
            "keys": self.place.keys,
            "touch": self.place.touch,
        }
        try:
            while True:
                number, name, args = asked(link.channel.recv(None))
                answer = calls[name](*args)
                link.channel.send([number, answer, len(self.place.pages), self.place.used_bytes])
        except (PeerGoneError, ClosedError):
            return
        finally:
            with self._lock:
                self._links.discard(link)

    def _write_for_peer(self, key: bytes, page: bytes) -> bool | None:
        """Whether it is kept; ``None``: it is larger than the budget."""
        try:
            return self.place.write(key, page)
        except CapacityError:
            return None

    def abort(self) -> None:
        with self._lock:
            links, self._links = self._links, set()
        for link in links:
            link.close()
        super().abort()


def asked(message: Any) -> tuple[int, str, list[Any]]:
    """What an end asks for: the number of its call, the call's name, and its arguments.

    Raises:
        WireError: it is no call.
    """
    match message:
        case [int(number), "has" | "remove" | "touch" as name, keys] if is_list_of(bytes, keys):
            return number, name, [keys]
        case [int(number), "read" | "keys" as name, bytes(key)]:
            return number, name, [key]
        case [int(number), "write", bytes(key), bytes(page)]:
            return number, "write", [key, page]
    raise WireError("an end of a store sends what is no call")


def is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


# -- an end that reaches it by a link --------------------------------------------------------------


class RemotePlace(BlockingStore):
    """The pages of a place in another process, one call at a time."""

    num_threads = 1

    def __init__(self, link: StoreLink, timeout_s: float) -> None:
        self._channel = link.channel
        self._link = link
        self._timeout_s = timeout_s
        self._number = 0
        self._usage = Usage(num_pages=0, used_bytes=0, budget_bytes=None)
        self._lock = threading.Lock()
        self.is_gone = False

    def _call(self, name: str, *args: Any) -> Any:
        deadline = Deadline.after(self._timeout_s)
        with self._lock:
            self._number += 1
            try:
                self._channel.send([self._number, name, *args], timeout=deadline.remaining())
                number = 0
                while number != self._number:  # the answer to a call that ran out of time may come first
                    said = self._channel.recv(timeout=deadline.remaining())
                    number, answer, self._usage = self.answered(said)
            except PeerGoneError:
                self.is_gone = True
                raise
        if not self.fits(answer, name, *args):
            raise WireError(f"{self._channel.peer} has answered {name!r} with something else")
        return answer

    def answered(self, said: Any) -> tuple[int, Any, Usage]:
        """The number of a call, its result, and the store's usage.

        Raises:
            WireError: it is no answer.
        """
        match said:
            case [int(number), answer, int(num_pages), int(used_bytes)] if min(num_pages, used_bytes) >= 0:
                usage = Usage(num_pages=num_pages, used_bytes=used_bytes, budget_bytes=None)
                return number, answer, usage
        raise WireError(f"{self._channel.peer} sends what is no answer")

    def fits(self, answer: Any, name: str, *args: Any) -> bool:
        """Whether it is an answer to that call."""
        match name:
            case "has":
                return is_list_of(bool, answer) and len(answer) == len(args[0])
            case "read":
                return answer is None or isinstance(answer, bytes)
            case "write":
                return answer is None or isinstance(answer, bool)
            case "keys":
                return is_list_of(bytes, answer)
        return answer is None

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return self._call("has", list(keys))  # type: ignore[no-any-return]

    def read(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        page = self._call("read", key)
        return None if page is None else fill(into, page)

    def write(self, key: bytes, page: Sequence[memoryview]) -> bool:
        kept: bool | None = self._call("write", key, b"".join(page))
        if kept is None:
            raise CapacityError("a page that is larger than the budget")
        return kept

    def remove(self, keys: Sequence[bytes]) -> None:
        self._call("remove", list(keys))

    def clear(self) -> None:
        raise UnsupportedError("other programs keep pages in this store, too")

    def keys(self, series: bytes) -> list[bytes]:
        return self._call("keys", series)  # type: ignore[no-any-return]

    def touch(self, keys: Sequence[bytes]) -> None:
        self._call("touch", list(keys))

    def usage(self) -> Usage:
        return self._usage

    def close(self) -> None:
        self._link.close()


class RemoteMemoryStore(ExecutedStore):
    """An end in a process that reaches the store by a link: without leases, events and declared pages."""

    remote_type = RemotePlace

    def __init__(self, context: StoreContext, link: StoreLink) -> None:
        self._remote = self.remote_type(link, context.timeout_s)
        super().__init__(self._remote, name="memory", seal=context.seal, timeout_s=context.timeout_s)

    @property
    def is_lost(self) -> bool:
        return self._remote.is_gone or super().is_lost


def fill(into: Sequence[memoryview], page: bytes) -> int:
    """Copy the page into the buffers, as far as they reach. Returns its length."""
    at = 0
    for buffer in into:
        part = page[at : at + len(buffer)]
        buffer[: len(part)] = part
        at += len(buffer)
    return len(page)
