"""The store "nixl" over a folder: NIXL's backend POSIX reads and writes the files."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Final, Literal

from kvplug import TransportError
from kvplug.transport import BlockingStore, FolderStore, MissReason
from kvplug_nixl.store.agent import Agent, Move
from kvplug_nixl.store.options import NixlStoreOptions

DEFAULT_SIZE: Final = 16 << 30
LAYOUT: Final = "nixl-v1"
"""Name of the folder inside. A version that arranges the files differently uses another name."""


class FileStore(FolderStore):
    """Pages under keys, one file each. NIXL moves the bytes, and has no names, budget or removal."""

    def __init__(self, options: NixlStoreOptions) -> None:
        """Raises ConfigError: ``path`` is not a folder, or other users can write to it."""
        assert options.path is not None
        size = DEFAULT_SIZE if options.size is None else options.size
        super().__init__(
            options.path, size, layout=LAYOUT, option="options.nixl.path", num_threads=options.transfers
        )
        # Linux's AIO: in containers io_uring is usually forbidden
        parameters = {"use_aio": "true", "ios_pool_size": "1024", "kernel_queue_size": "64"}
        self._agent = Agent("POSIX", parameters.copy)

    def read_file(self, fd: int, into: Sequence[memoryview]) -> int:
        length = os.fstat(fd).st_size
        if not self._move("READ", fd, into, length):
            if os.fstat(fd).st_size == length:
                raise BlockingStore.PageError(
                    MissReason.UNREADABLE, f"NIXL cannot read a page in {self.location}"
                )
            return 0  # it was cut off meanwhile, and will be removed as a wrong page
        return min(length, sum(buffer.nbytes for buffer in into))

    def write_file(self, fd: int, page: Sequence[memoryview]) -> None:
        nbytes = sum(part.nbytes for part in page)
        if self._move("WRITE", fd, page, nbytes):
            return
        # NIXL does not say why it has failed: the system does
        os.pwrite(fd, b"\0", max(0, nbytes - 1))
        os.fsync(fd)
        free = os.fstatvfs(fd)
        if free.f_bavail * free.f_frsize < nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise TransportError(f"NIXL cannot write to {self.location}")

    def _move(
        self, operation: Literal["READ", "WRITE"], fd: int, buffers: Sequence[memoryview], length: int
    ) -> bool:
        """Move the first ``length`` bytes of the file, or as many as fit. Returns whether it succeeded."""
        moves, at = [], 0
        for buffer in buffers:
            part = buffer.cast("B")[: length - at]
            if part.nbytes:
                moves.append(Move(part, device=fd, offset=at))
            at += part.nbytes
        return not moves or all(self._agent.move(operation, moves))

    def close(self) -> None:
        super().close()
        self._agent.close()
