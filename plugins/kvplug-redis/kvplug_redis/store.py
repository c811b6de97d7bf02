"""The store "redis": pages in values of Redis or Valkey."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import attrs

from kvplug import CapacityError
from kvplug.transport import BlockingStore, PageSeal, Usage, WireError
from kvplug_redis.budget import Budget, Reserved, drop_manifest
from kvplug_redis.connection import Client, Command, NoRoomError, checked, mapped_errors
from kvplug_redis.options import RedisOptions
from kvplug_redis.values import HEAD_BYTES, MAX_PIECES, Head, Names, cut, tag_of

T = TypeVar("T")

_log = logging.getLogger(__name__)

_KEEP: Final = """
-- keys: the manifest and the pieces; arguments: the head, and the lifetime in milliseconds or 0
for i = 2, #KEYS do
    if redis.call('STRLEN', KEYS[i]) == 0 then return -1 end
end
if not redis.call('SET', KEYS[1], ARGV[1], 'NX') and redis.pcall('GET', KEYS[1]) ~= ARGV[1] then return 0 end
for i = 1, #KEYS do
    if ARGV[2] == '0' then redis.call('PERSIST', KEYS[i]) else redis.call('PEXPIRE', KEYS[i], ARGV[2]) end
end
return 1
"""
"""Makes a page visible whose pieces are all there, and lets them live as long as it."""
_KEPT: Final = (b"OK", 1)
"""What the server replies if a page is visible now, without pieces and with."""
_INCOMPLETE: Final = -1
"""What it replies if a piece is gone."""
_BATCH_BYTES: Final = 8 << 20
"""Bytes of pages that one connection moves with one round trip. A thread keeps as much memory for its writes,
and the server may for its replies."""
_ORPHAN_MS: Final = 600_000
"""Time after which pieces without a manifest expire. A writer that died leaves them."""
_TAG_AT: Final = 8
"""The offset of the tag in a manifest."""
_TRIES: Final = 32
_HEADER_BYTES: Final = (4096, 2 << 20)
"""Bytes of a page to read for its series: enough for most headers, then for all."""
_SCAN: Final = 1000
_REMEMBERED: Final = 1 << 16


class RedisStore(BlockingStore):
    """Pages under keys, which every process that names the server and the prefix shares."""

    is_shared = True

    def __init__(self, context: BlockingStore.Context) -> None:
        """Raises ConfigError: the options are wrong, or a file cannot be used."""
        options: RedisOptions = context.options
        self.location = ", ".join(options.address)
        self.num_threads = options.connections
        self.batch_bytes = _BATCH_BYTES
        if options.size is not None:
            self.batch_bytes = min(_BATCH_BYTES, options.size // (Budget.SHARE * options.connections))
        self._client = Client(options)
        self._names = Names(options.prefix)
        self._piece = options.piece_bytes
        self._ttl_ms = None if options.ttl_s is None else int(options.ttl_s * 1000)
        self._touch_s = options.touch_s
        self._budget: Budget | None = None
        if options.size is not None:
            self._budget = Budget(self._client, self._names.budget, options.size, options.ttl_s)
        self._is_cluster = options.mode == "cluster"
        self._is_uncounted = False
        """Whether the budget has lost its records, and the pages that are there must be recorded again."""
        self._touched: OrderedDict[bytes, float] = OrderedDict()
        self._lock = threading.Lock()
        self._was_full = False

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        budget, version = self._budget, 0 if self._budget is None else self._budget.version
        commands = [Command.of(b"STRLEN", self._names.manifest(key)) for key in keys]
        with mapped_errors():
            found = _values(self._client.run([*commands, *(() if budget is None else budget.figures())]))
        if budget is not None:
            budget.note(found[len(keys) :], version)
        return [(length or 0) >= HEAD_BYTES for length in found[: len(keys)]]

    def _heads(self, keys: Sequence[bytes]) -> list[Head | None]:
        """The head of each key's page; ``None`` if the key has no page."""
        return [_head_of(begin) for begin in _values(self._client.run([self._head(key) for key in keys]))]

    def _head(self, key: bytes) -> Command:
        return _part(self._names.manifest(key), 0, HEAD_BYTES)

    # -- reading -------------------------------------------------------------------------------

    def read(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        ((_, length),) = self.read_pages([key], [into])
        return length

    def read_pages(
        self, keys: Sequence[bytes], into: Sequence[Sequence[memoryview]]
    ) -> Generator[tuple[int, int | None], None, None]:
        # the first round trip reads heads and small pages, the second one the content of large pages
        wanted = [sum(map(len, buffers)) for buffers in into]
        begins = [memoryview(bytearray(HEAD_BYTES)) for _ in keys]
        is_small = [HEAD_BYTES + nbytes <= self._piece for nbytes in wanted]
        groups = [
            [_part(self._names.manifest(key), 0, into=[begin, *(buffers if small else ())])]
            for key, begin, buffers, small in zip(keys, begins, into, is_small, strict=True)
        ]
        heads: dict[int, Head] = {}
        large: dict[int, Sequence[Command]] = {}
        wrong: Exception | None = None
        with mapped_errors():
            for index, replies in self._client.stream(groups):
                (length,) = _values(replies)
                head = _head_of(begins[index][:length])
                if length is None:
                    (wrong,) = replies
                elif length == 0:
                    yield index, None
                elif head is None:
                    yield index, 0  # not a page: it will be removed as a wrong one
                else:
                    heads[index] = head
                    if is_small[index] and not head.piece:
                        yield index, head.length if head.length != wanted[index] else length - HEAD_BYTES
                    else:
                        large[index] = self._content(keys[index], head, into[index])
            lost = []
            order = list(large)
            for at, replies in self._client.stream([*large.values(), *self._uses(keys, heads)]):
                if at >= len(order):
                    continue  # a use that could not be recorded: the page can be read
                index, head = order[at], heads[order[at]]
                length = sum(each or 0 for each in _values(replies))
                if length == min(wanted[index], head.length):
                    yield index, head.length
                elif head.piece:
                    lost.append(index)
                else:
                    yield index, length
            self._forget([_member(keys[index], heads[index]) for index in lost])
            yield from ((index, None) for index in lost)
            if wrong is not None:
                raise wrong

    def _content(self, key: bytes, head: Head, into: Sequence[memoryview]) -> Sequence[Command]:
        """Commands that read a page's bytes after its head, as far as the buffers go."""
        if not head.piece:
            return [_part(self._names.manifest(key), HEAD_BYTES, into=into)]
        groups = list(cut(into, head.piece))
        names = self._names.pieces(key, head.tag, min(head.num_pieces, len(groups)))
        return [_part(name, 0, into=group) for name, group in zip(names, groups, strict=False)]

    def _uses(self, keys: Sequence[bytes], heads: Mapping[int, Head]) -> list[list[Command]]:
        """Groups of commands that record a use of these pages, unless that was done a moment ago.

        Their errors do not matter: a page can be read even if the server is full or read-only for this user.

        Args:
            heads: of pages, by their index in ``keys``.
        """
        if self._budget is None and self._ttl_ms is None:
            return []
        now, used = time.monotonic(), []
        with self._lock:
            for index in heads:
                if now - self._touched.get(keys[index], -math.inf) >= self._touch_s:
                    self._touched[keys[index]] = now
                    self._touched.move_to_end(keys[index])
                    used.append(index)
            while len(self._touched) > _REMEMBERED:
                self._touched.popitem(last=False)
        groups = []
        if self._budget is not None and used:
            groups.append([self._budget.use_of([_member(keys[index], heads[index]) for index in used])])
        if self._ttl_ms is not None:
            for index in used:
                head = heads[index]
                names = self._names.pieces(keys[index], head.tag, head.num_pieces)
                names.append(self._names.manifest(keys[index]))
                groups.append([Command.of(b"PEXPIRE", name, self._ttl_ms) for name in names])
        return groups

    def touch(self, keys: Sequence[bytes]) -> None:
        with mapped_errors():
            heads = {index: head for index, head in enumerate(self._heads(keys)) if head is not None}
            for _ in self._client.stream(self._uses(keys, heads)):
                pass

    # -- writing -------------------------------------------------------------------------------

    def write(self, key: bytes, page: Sequence[memoryview]) -> bool:
        return self.write_pages([key], [page])[0]

    def write_pages(self, keys: Sequence[bytes], pages: Sequence[Sequence[memoryview]]) -> list[bool]:
        # the first round trip looks for the pages and reserves room, the second one writes
        new = [self._new_page(key, page) for key, page in zip(keys, pages, strict=True)]
        with mapped_errors():
            room, heads = self._reserved(new, [self._head(page.key) for page in new])
            others = [_head_of(begin) for begin in _values(heads)]
            kept = {index for index, head in enumerate(others) if head is not None}
            if self._budget is not None:
                surplus = [index for index in kept if room.made[index] and others[index] != new[index].head]
                self._release([new[index] for index in surplus])
            left = [index for index in range(len(new)) if index not in kept]
            made = dict(enumerate(room.made))
            for _ in range(_TRIES):
                if left and room.error is not None:
                    self._note_full(room.error)
                    break
                ready = [index for index in left if made[index]]
                written, evicted = self._write(new, ready)
                kept.update(written)
                left = [index for index in left if not made[index] or index in evicted]
                if not left or not (ready or room.victims):
                    break
                if self._budget is not None and room.victims:
                    self._forget(room.victims, evicted=True)
                room, _ = self._reserved([new[index] for index in left])
                made = dict(zip(left, room.made, strict=True))
        return [index in kept for index in range(len(new))]

    def _new_page(self, key: bytes, page: Sequence[memoryview]) -> _NewPage:
        length = sum(map(len, page))
        piece = 0 if HEAD_BYTES + length <= self._piece else self._piece
        head = Head(tag_of(page), length, piece)
        if self._budget is not None and head.cost > self._budget.size:
            raise CapacityError(
                f"a page takes {head.cost} bytes in the server, but the budget is {self._budget.size}"
            )
        if head.num_pieces > MAX_PIECES:
            raise CapacityError(f"a page has {head.num_pieces} pieces: raise options.redis.piece_bytes")
        return _NewPage(key, head, page)

    def _reserved(self, new: Sequence[_NewPage], also: Sequence[Command] = ()) -> tuple[Reserved, list[Any]]:
        """Reserve room for pages. Returns also the replies to the commands ``also``.

        If the node of a cluster that had the records has lost them, the pages of the other nodes are recorded
        again."""
        if self._budget is None:
            return Reserved([True] * len(new), []), self._client.run(also)
        reserved, replies = self._budget.reserve([page.record for page in new], also)
        self._is_uncounted |= reserved.was_empty and self._is_cluster
        if self._is_uncounted:
            for heads in self._all_heads():
                records = [_record(key, head) for key, head in heads.items()]
                checked(self._client.run([self._budget.written(records)]))
            self._is_uncounted = False
        return reserved, replies

    def _write(
        self, new: Sequence[_NewPage], ready: Sequence[int], *, is_last: bool = False
    ) -> tuple[list[int], list[int]]:
        """Write the pages with these indices, for which there is room.

        Returns the pages that the server has, and those that another client evicted before they were whole.

        Args:
            is_last: whether a key whose value is not a page keeps that value.
        """
        kept: list[int] = []
        taken: list[int] = []
        failed: list[int] = []
        evicted: list[int] = []
        error: Exception | None = None
        groups = [self._values_of(new[index]) for index in ready]
        if self._budget is not None and ready:
            groups.append([self._budget.written([new[index].record for index in ready])])
        for at, replies in self._client.stream(groups):
            if at == len(ready):
                continue  # a full server refuses to record pages, and does not have them
            errors = [reply for reply in replies if isinstance(reply, Exception)]
            error = errors[0] if errors else error
            group = kept if replies[-1] in _KEPT else evicted if replies[-1] == _INCOMPLETE else taken
            (failed if errors else group).append(ready[at])
        wrong: list[int] = []
        for index, head in zip(taken, self._heads([new[index].key for index in taken]), strict=True):
            if head is None:
                (failed if is_last else wrong).append(index)
                continue
            kept.append(index)
            if head != new[index].head:  # else the other writer's pieces have the same names and content
                failed.append(index)
        self._release([new[index] for index in failed + evicted])
        if error is not None:
            self._note_full(error)
        if wrong:
            manifests = [self._names.manifest(new[index].key) for index in wrong]
            self._unlink(manifests)
            for written, more in zip((kept, evicted), self._write(new, wrong, is_last=True), strict=True):
                written += more
        return kept, evicted

    def _values_of(self, page: _NewPage) -> list[Command]:
        """Commands that write a page, unless its key is taken. The last one makes it visible."""
        key, head, manifest = page.key, page.head, self._names.manifest(page.key)
        if not head.piece:
            lifetime: list[bytes | int] = [] if self._ttl_ms is None else [b"PX", self._ttl_ms]
            value = [memoryview(head.to_bytes()), *(part.cast("B") for part in page.parts)]
            return [Command.of(b"SET", manifest, value, b"NX", *lifetime)]
        names = self._names.pieces(key, head.tag, head.num_pieces)
        pieces = zip(names, cut(page.parts, head.piece), strict=True)
        return [
            *(Command.of(b"SET", name, group, b"PX", _ORPHAN_MS) for name, group in pieces),
            Command.script(_KEEP, [manifest, *names], head.to_bytes(), self._ttl_ms or 0),
        ]

    def _note_full(self, error: Exception) -> None:
        """Log once that the server is full. Raises any other error."""
        try:
            with mapped_errors():
                raise error
        except NoRoomError as e:
            if not self._was_full:
                self._was_full = True
                _log.warning("the store 'redis' keeps fewer pages: %s", e)

    def _release(self, new: Sequence[_NewPage]) -> None:
        """Remove the pieces of pages that were not kept, and what they count."""
        pieces = [self._names.pieces(page.key, page.head.tag, page.head.num_pieces) for page in new]
        self._unlink(itertools.chain(*pieces))
        if self._budget is not None:
            self._budget.release([page.member for page in new])

    def _unlink(self, names: Iterable[bytes]) -> None:
        checked(self._client.run([*map(_unlinking, names)]))

    def _forget(self, members: Sequence[bytes], *, evicted: bool = False) -> None:
        """Remove pages that are evicted, or of which the server has evicted a piece."""
        commands = []
        for member in members:
            key, tag, count = _parsed_member(member)
            commands.append(drop_manifest(self._names.manifest(key), tag, _TAG_AT))
            commands += map(_unlinking, self._names.pieces(key, tag, count))
        checked(self._client.run(commands))
        if self._budget is not None:
            self._budget.release(members, evicted=evicted)

    def remove(self, keys: Sequence[bytes]) -> None:
        with mapped_errors():
            names, members = [], []
            for key, head in zip(keys, self._heads(keys), strict=True):
                names.append(self._names.manifest(key))
                if head is not None:
                    names += self._names.pieces(key, head.tag, head.num_pieces)
                    members.append(_member(key, head))
            self._unlink(names)
            if self._budget is not None:
                self._budget.release(members)

    def clear(self) -> None:
        with mapped_errors():
            names = self._client.get().scan_iter(match=self._names.every, count=_SCAN)
            for batch in _batches([*names, *self._names.budget], _SCAN):
                self._unlink(batch)
        if self._budget is not None:
            self._budget.note((0, 0), self._budget.version)

    # -- contents ------------------------------------------------------------------------------

    def keys(self, series: bytes) -> list[bytes]:
        found = []
        with mapped_errors():
            for heads in self._all_heads():
                found += self._in_series(heads, series)
        return found

    def _all_heads(self) -> Iterator[dict[bytes, Head]]:
        """The heads of all pages, some at a time."""
        names = self._client.get().scan_iter(match=self._names.manifests, count=_SCAN)
        keys = {key for name in names if (key := self._names.key_of(name)) is not None}
        for batch in _batches([*keys], _SCAN):
            heads = zip(batch, self._heads(batch), strict=True)
            yield {key: head for key, head in heads if head is not None}

    def _in_series(self, heads: dict[bytes, Head], series: bytes) -> list[bytes]:
        """The keys of those of the pages whose header states the series."""
        found = []
        for nbytes in _HEADER_BYTES:
            longer = {}
            for batch in _batches([*heads], max(1, _HEADER_BYTES[-1] // nbytes)):
                commands = []
                for key in batch:
                    names = self._names.pieces(key, heads[key].tag, min(1, heads[key].num_pieces))
                    name, at = (names[0], 0) if names else (self._names.manifest(key), HEAD_BYTES)
                    commands.append(_part(name, at, nbytes))
                for key, header in zip(batch, _values(self._client.run(commands)), strict=True):
                    stated = PageSeal.split(header or b"")
                    if stated is not None and stated[1] == series:
                        found.append(key)
                    elif stated is None and header is not None and len(header) == nbytes:
                        longer[key] = heads[key]
            heads = longer
        return found

    def usage(self) -> Usage:
        budget = self._budget
        if budget is None:
            return Usage(num_pages=0, used_bytes=0, budget_bytes=None)
        return Usage(
            num_pages=budget.num_pages,
            used_bytes=budget.used_bytes,
            budget_bytes=budget.size,
            num_evicted=budget.num_evicted,
        )

    def close(self) -> None:
        self._client.close()


@attrs.frozen
class _NewPage:
    key: bytes
    head: Head
    parts: Sequence[memoryview]

    @property
    def member(self) -> bytes:
        return _member(self.key, self.head)

    @property
    def record(self) -> tuple[bytes, int]:
        return _record(self.key, self.head)


def _unlinking(name: bytes) -> Command:
    """A command that removes a value. One with several keys fails while a cluster moves their slot."""
    return Command.of(b"UNLINK", name)


def _part(name: bytes, begin: int, nbytes: int = 0, *, into: Sequence[memoryview] | None = None) -> Command:
    """A command that reads a part of a value, to the memory ``into`` if it is given."""
    nbytes = nbytes if into is None else sum(map(len, into))
    return Command.of(b"GETRANGE", name, begin, begin + nbytes - 1, into=into)


def _values(replies: Sequence[Any]) -> list[Any]:
    """The replies; ``None`` for a key with a value of another type. Raises any other error."""
    others = [isinstance(each, Exception) and str(each).startswith("WRONGTYPE") for each in replies]
    return [*checked([None if other else each for other, each in zip(others, replies, strict=True)])]


def _head_of(begin: bytes | memoryview | None) -> Head | None:
    """The head at the beginning of a value; ``None`` if it is not that of a page."""
    try:
        return Head.from_bytes(begin or b"")
    except WireError:
        return None


def _batches(items: Sequence[T], count: int) -> Iterator[Sequence[T]]:
    return (items[at : at + count] for at in range(0, len(items), count))


def _member(key: bytes, head: Head) -> bytes:
    return key + head.tag + b"%d" % head.num_pieces


def _record(key: bytes, head: Head) -> tuple[bytes, int]:
    """What the budget records of a page."""
    return _member(key, head), head.cost


def _parsed_member(member: bytes) -> tuple[bytes, bytes, int]:
    return member[:32], member[32:40], int(member[40:])
