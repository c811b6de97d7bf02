"""The store "nixl" over a folder: NIXL's backend POSIX reads and writes the files."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Sequence
from typing import Final, Literal

from kvplug import CapacityError, TransportError
from kvplug.transport import BlockingStore, MissReason, Usage
from kvplug_nixl.store.agent import Agent, Move
from kvplug_nixl.store.folder import Folder, cost_of
from kvplug_nixl.store.options import NixlStoreOptions

DEFAULT_SIZE: Final = 16 << 30
_TOUCH_S: Final = 1.0
"""A read is noted as a use of its page if the last noted one is older than this."""
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class FileStore(BlockingStore):
    """Pages under keys, one file each, shared by every process that names the folder.

    NIXL moves the bytes. Names, budget and removal are this store's own: NIXL has none of them.
    """

    is_shared = True
    medium = "disk"

    def __init__(self, options: NixlStoreOptions) -> None:
        assert options.path is not None
        self.num_threads = options.transfers
        self._budget = DEFAULT_SIZE if options.size is None else options.size
        self._folder = Folder(options.path, self._budget)
        self.location = self._folder.path
        # Linux's AIO: in containers io_uring is usually forbidden
        parameters = {"use_aio": "true", "ios_pool_size": "1024", "kernel_queue_size": "64"}
        self._agent = Agent("POSIX", parameters.copy)

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return self._folder.has(keys)

    def read(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        fd = self._folder.open(key)
        if fd is None:
            return None
        try:
            status = os.fstat(fd)
            if not self._move("READ", fd, into, status.st_size):
                if os.fstat(fd).st_size == status.st_size:
                    raise BlockingStore.PageError(
                        MissReason.UNREADABLE, f"NIXL cannot read {self._folder.path_of(key)}"
                    )
                return 0  # it was cut off meanwhile, and will be removed as a wrong page
        finally:
            os.close(fd)
        if time.time() - status.st_mtime >= _TOUCH_S:
            self._folder.note_use((key,))
        return status.st_size

    def _move(
        self, operation: Literal["READ", "WRITE"], fd: int, buffers: Sequence[memoryview], length: int
    ) -> bool:
        """The first ``length`` bytes of the file, or as many as fit. Returns whether they were moved."""
        moves, at = [], 0
        for buffer in buffers:
            part = buffer.cast("B")[: length - at]
            if part.nbytes:
                moves.append(Move(part, device=fd, offset=at))
            at += part.nbytes
        return not moves or all(self._agent.move(operation, moves))

    def touch(self, keys: Sequence[bytes]) -> None:
        self._folder.note_use(keys)

    def write(self, key: bytes, page: Sequence[memoryview]) -> bool:
        nbytes = sum(part.nbytes for part in page)
        if cost_of(nbytes) > self._budget:
            raise CapacityError(f"a page of {cost_of(nbytes)} bytes, and the budget is {self._budget}")
        with _read_only_is_no_permission():
            if self._folder.is_page(key):
                return True
            if (kept := self._write(key, page, nbytes)) is not None:
                return kept
            # the disk was full before the budget was used
            return self._folder.make_room(2 * cost_of(nbytes)) and bool(self._write(key, page, nbytes))

    def _write(self, key: bytes, page: Sequence[memoryview], nbytes: int) -> bool | None:
        """Whether the page is there now; false: the budget has no room for it; ``None``: the disk is full."""
        try:
            with self._folder.new_file(nbytes) as file:
                if file is None:
                    return False
                fd, path = file
                if self._move("WRITE", fd, page, nbytes):
                    self._folder.publish(path, key)
                    return True
                # NIXL does not say why: the system does
                os.pwrite(fd, b"\0", max(0, nbytes - 1))
                os.fsync(fd)
                free = os.fstatvfs(fd)
                if free.f_bavail * free.f_frsize < cost_of(nbytes):
                    return None
        except OSError as e:
            if e.errno not in _FULL:
                raise
            return None
        raise TransportError(f"NIXL cannot write to {os.path.dirname(path)}")

    def remove(self, keys: Sequence[bytes]) -> None:
        with _read_only_is_no_permission():
            for key in keys:
                self._folder.remove(key)

    def usage(self) -> Usage:
        totals = self._folder.last
        return Usage(
            num_pages=totals.num_pages,
            used_bytes=totals.used_bytes,
            budget_bytes=self._budget,
            num_evicted=self._folder.num_evicted,
        )

    def close(self) -> None:
        self._agent.close()


@contextlib.contextmanager
def _read_only_is_no_permission() -> Iterator[None]:
    try:
        yield
    except OSError as e:
        if e.errno == errno.EROFS:
            raise PermissionError(e.errno, e.strerror, e.filename) from e
        raise
