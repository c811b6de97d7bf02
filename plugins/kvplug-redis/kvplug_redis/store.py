"""The store "redis": pages in values of Redis or Valkey."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Final

from kvplug import CapacityError
from kvplug.transport import BlockingStore, PageSeal, Usage, WireError
from kvplug_redis.budget import Budget, drop_manifest
from kvplug_redis.connection import Client, NoRoomError, mapped_errors
from kvplug_redis.landing import LANDED, LongReplyError, landing
from kvplug_redis.options import RedisOptions
from kvplug_redis.values import HEAD_BYTES, MAX_PIECES, TAG_BYTES, Head, Names, cost_of, cut, tag_of

_log = logging.getLogger(__name__)

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
        self._client = Client(options)
        self._names = Names(options.prefix)
        self._piece = options.piece_bytes
        self._ttl_ms = None if options.ttl_s is None else int(options.ttl_s * 1000)
        self._touch_s = options.touch_s
        self._budget: Budget | None = None
        if options.size is not None:
            self._budget = Budget(self._client.get, self._names.budget, options.size, options.ttl_s)
        self._touched: OrderedDict[bytes, float] = OrderedDict()
        self._lock = threading.Lock()
        self._was_full = False

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        budget, version = self._budget, 0 if self._budget is None else self._budget.version
        with mapped_errors(), self._pipe() as pipe:
            for key in keys:
                pipe.strlen(self._names.manifest(key))
            if budget is not None:
                budget.refresh(pipe)
            found = _answers(pipe)
        if budget is not None:
            budget.note(found[len(keys) :], version)
        return [length is not None and length >= HEAD_BYTES for length in found[: len(keys)]]

    def _pipe(self) -> Any:
        return self._client.get().pipeline(transaction=False)

    # -- reading -------------------------------------------------------------------------------

    def read(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        begin = memoryview(bytearray(HEAD_BYTES))
        wanted, manifest = sum(map(len, into)), self._names.manifest(key)
        whole, longer = HEAD_BYTES + wanted, None
        with mapped_errors():
            client = self._client.get()
            try:
                with landing(whole, [begin, *into]):
                    found = client.get(manifest)
            except LongReplyError as e:
                longer = e.length - HEAD_BYTES
                with landing(whole, [begin, *into]):  # its beginning identifies it
                    found = client.getrange(manifest, 0, whole - 1)
            if found is None:
                return None
            try:
                head = Head.from_bytes(begin if found is LANDED else found)
            except WireError:
                return 0  # not a page: it will be removed as a wrong one
            if longer is not None:
                return longer
            if head.piece and head.length != wanted:
                for view in into[:1]:
                    view[:] = bytes(len(view))
            elif head.piece:
                if not self._read_pieces(client, key, head, into):
                    self._drop(client, key, head)
                    return None
            elif found is not LANDED:
                _spread(memoryview(found)[HEAD_BYTES:], into)
                if len(found) != HEAD_BYTES + head.length:
                    return len(found) - HEAD_BYTES
            self._note_use(client, key, head)
        return head.length

    def _read_pieces(self, client: Any, key: bytes, head: Head, into: Sequence[memoryview]) -> bool:
        """Returns whether all pieces exist."""
        left = head.length
        names = self._names.pieces(key, head.tag, head.num_pieces)
        for name, group in zip(names, cut(into, head.piece), strict=False):
            length = min(left, head.piece)
            left -= length
            try:
                with mapped_errors(), landing(length, group):
                    found = client.get(name)
            except BlockingStore.PageError:
                return False
            if found is not LANDED:
                if found is None or len(found) != length:
                    return False
                _spread(memoryview(found), group)
        return True

    def _drop(self, client: Any, key: bytes, head: Head) -> None:
        """Remove a page of which the server has evicted a piece."""
        drop_manifest(client, self._names.manifest(key), head.tag, _TAG_AT)
        self._unlink(self._names.pieces(key, head.tag, head.num_pieces))
        if self._budget is not None:
            self._budget.release([_member(key, head)])

    def _note_use(self, client: Any, key: bytes, head: Head) -> None:
        if self._budget is None and self._ttl_ms is None:
            return
        now = time.monotonic()
        with self._lock:
            if now - self._touched.get(key, -1e9) < self._touch_s:
                return
            self._touched[key] = now
            self._touched.move_to_end(key)
            if len(self._touched) > _REMEMBERED:
                self._touched.popitem(last=False)
        # best effort: the page can be read even if the server is full or read-only for this user
        with contextlib.suppress(PermissionError, NoRoomError, BlockingStore.PageError), mapped_errors():
            if self._budget is not None:
                self._budget.touch([_member(key, head)])
            if self._ttl_ms is not None:
                names = self._names.pieces(key, head.tag, head.num_pieces)
                self._renew([self._names.manifest(key), *names])

    def _renew(self, names: Sequence[bytes]) -> None:
        """Give these values of an existing page the lifetime of a page."""
        with self._pipe() as pipe:
            for name in names:
                pipe.persist(name) if self._ttl_ms is None else pipe.pexpire(name, self._ttl_ms)
            pipe.execute()

    def touch(self, keys: Sequence[bytes]) -> None:
        with mapped_errors():
            client = self._client.get()
            for key, head in self._heads(keys):
                self._note_use(client, key, head)

    def _heads(self, keys: Sequence[bytes]) -> Iterator[tuple[bytes, Head]]:
        """The heads of the existing pages."""
        with self._pipe() as pipe:
            for key in keys:
                pipe.getrange(self._names.manifest(key), 0, HEAD_BYTES - 1)
            found = _answers(pipe)
        for key, begin in zip(keys, found, strict=True):
            with contextlib.suppress(WireError):
                yield key, Head.from_bytes(begin or b"")

    # -- writing -------------------------------------------------------------------------------

    def write(self, key: bytes, page: Sequence[memoryview]) -> bool:
        length = sum(map(len, page))
        piece = 0 if HEAD_BYTES + length <= self._piece else self._piece
        cost = cost_of(length, self._piece)
        if self._budget is not None and cost > self._budget.size:
            raise CapacityError(
                f"a page takes {cost} bytes in the server, but the budget is {self._budget.size}"
            )
        head = Head(tag_of(page), length, piece)
        if head.num_pieces > MAX_PIECES:
            raise CapacityError(f"a page has {head.num_pieces} pieces: raise options.redis.piece_bytes")
        with mapped_errors():
            if self.has((key,))[0]:
                return True
            client = self._client.get()
            try:
                with mapped_errors():
                    if self._budget is not None and not self._reserve(client, _member(key, head), cost):
                        return False
                    return self._write(client, key, head, page)
            except NoRoomError as e:
                if not self._was_full:
                    self._was_full = True
                    _log.warning("the store 'redis' keeps fewer pages: %s", e)
                self._discard_pieces(key, head)
                return False

    def _write(self, client: Any, key: bytes, head: Head, page: Sequence[memoryview]) -> bool:
        names = self._names.pieces(key, head.tag, head.num_pieces)
        if head.piece:
            for name, group in zip(names, cut(page, head.piece), strict=True):
                client.set(name, _joined(group), px=_ORPHAN_MS)
            value: Any = head.to_bytes()
        else:
            value = b"".join([head.to_bytes(), *page])
        manifest = self._names.manifest(key)
        is_first = client.set(manifest, value, nx=True, px=self._ttl_ms)
        if not is_first and not self.has((key,))[0]:  # the existing value is not a page
            is_first = client.set(manifest, value, px=self._ttl_ms)
        if is_first:
            if names:
                self._renew(names)
            return True
        first = [other for _, other in self._heads([key])]
        if first != [head]:  # else the other writer's pieces have the same names and content
            self._discard_pieces(key, head)
        return bool(first)

    def _reserve(self, client: Any, member: bytes, cost: int) -> bool:
        """Make room in the budget. Returns whether there is room."""
        assert self._budget is not None
        for _ in range(_TRIES):
            reserved = self._budget.reserve(member, cost)
            if reserved.is_made:
                return True
            if not reserved.victims:
                return False
            for victim in reserved.victims:
                key, tag, count = _parsed_member(victim)
                drop_manifest(client, self._names.manifest(key), tag, _TAG_AT)
                self._unlink(self._names.pieces(key, tag, count))
            self._budget.release(reserved.victims, evicted=True)
        return False

    def _discard_pieces(self, key: bytes, head: Head) -> None:
        """Remove pieces that have no manifest."""
        self._unlink(self._names.pieces(key, head.tag, head.num_pieces))
        if self._budget is not None:
            self._budget.release([_member(key, head)])

    def _unlink(self, names: Sequence[bytes]) -> None:
        for at in range(0, len(names), _SCAN):
            with self._pipe() as pipe:
                for name in names[at : at + _SCAN]:
                    pipe.unlink(name)
                pipe.execute()

    def remove(self, keys: Sequence[bytes]) -> None:
        with mapped_errors():
            heads = dict(self._heads(keys))
            self._unlink([self._names.manifest(key) for key in keys])
            for key, head in heads.items():
                self._unlink(self._names.pieces(key, head.tag, head.num_pieces))
            if self._budget is not None:
                self._budget.release([_member(key, head) for key, head in heads.items()])

    def clear(self) -> None:
        with mapped_errors():
            client = self._client.get()
            batch: list[bytes] = []
            for name in client.scan_iter(match=self._names.every, count=_SCAN):
                batch.append(name)
                if len(batch) == _SCAN:
                    self._unlink(batch)
                    batch = []
            self._unlink([*batch, *(name.encode() for name in self._names.budget)])
            if self._budget is not None:
                self._budget.note((0, 0), self._budget.version)

    # -- contents ------------------------------------------------------------------------------

    def keys(self, series: bytes) -> list[bytes]:
        with mapped_errors():
            client = self._client.get()
            names = client.scan_iter(match=self._names.manifests, count=_SCAN)
            keys = {key for name in names if (key := self._names.key_of(name)) is not None}
            return [key for key, head in self._heads([*keys]) if self._series_of(client, key, head) == series]

    def _series_of(self, client: Any, key: bytes, head: Head) -> bytes | None:
        """The series in a page's header; ``None`` if there is none, or the page is gone."""
        if head.piece:
            name, at = self._names.pieces(key, head.tag, 1)[0], 0
        else:
            name, at = self._names.manifest(key), HEAD_BYTES
        for nbytes in _HEADER_BYTES:
            header = client.getrange(name, at, at + nbytes - 1)
            stated = PageSeal.split(header)
            if stated is not None:
                return stated[1]
            if len(header) < nbytes:
                break
        return None

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


def _answers(pipe: Any) -> list[Any]:
    """The results of a pipeline's commands; ``None`` for a key with a value of another type."""
    found = pipe.execute(raise_on_error=False)
    for index, each in enumerate(found):
        if isinstance(each, Exception):
            if not str(each).startswith("WRONGTYPE"):
                raise each
            found[index] = None
    return found  # type: ignore[no-any-return]


def _member(key: bytes, head: Head) -> bytes:
    return key + head.tag + b"%d" % head.num_pieces


def _parsed_member(member: bytes) -> tuple[bytes, bytes, int]:
    end = len(member) - len(member[40:])
    return member[: end - TAG_BYTES], member[end - TAG_BYTES : end], int(member[end:])


def _joined(group: Sequence[memoryview]) -> memoryview | bytes:
    return group[0] if len(group) == 1 else b"".join(group)


def _spread(value: memoryview, into: Sequence[memoryview]) -> None:
    """Copy as much of the value as exists into one buffer after the other."""
    for view in into:
        part, value = value[: len(view)], value[len(view) :]
        view[: len(part)] = part
