"""A blocking store over files with one fault each, which shows when writers race or are killed."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs

from kvplug.config.options import option
from kvplug.errors import CapacityError
from kvplug.transport.store.blocking import BlockingStore
from kvplug.transport.store.results import Usage
from kvplug_lab.mutants import breaks
from kvplug_testing import BlockingStoreContract, StoreContract
from kvplug_testing.memory.store import fill


@attrs.frozen(kw_only=True)
class FileOptions:
    """Options of the store below."""

    path: str = option(help="Folder of the pages.")


class FileStore(BlockingStore):
    """A file for each page, written aside in pieces and linked to its name."""

    def __init__(self, context: Any) -> None:
        self._folder = Path(context.options.path)

    def _path(self, key: bytes) -> Path:
        return self._folder / key.hex()

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return [self._path(key).exists() for key in keys]

    def read(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        try:
            page = self._path(key).read_bytes()
        except FileNotFoundError:
            return None
        return fill(into, page)

    def write(self, key: bytes, page: Sequence[memoryview]) -> bool:
        aside = self._aside(key)
        self._write_pieces(aside, b"".join(page))
        try:
            self._publish(aside, self._path(key))
        finally:
            aside.unlink(missing_ok=True)
        return True

    def _aside(self, key: bytes) -> Path:
        return self._folder / f"aside-{secrets.token_hex(8)}"

    def _write_pieces(self, path: Path, page: bytes) -> None:
        """Slowly, so that others come in between."""
        step = max(1, len(page) // 5)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            for at in range(0, len(page), step):
                os.pwrite(fd, page[at : at + step], at)
                time.sleep(0.001)
        finally:
            os.close(fd)

    def _publish(self, aside: Path, path: Path) -> None:
        try:
            os.link(aside, path)
        except FileExistsError:
            return

    def remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._path(key).unlink(missing_ok=True)


class Judged:
    """One fault of ``made``. ``breaks`` are the laws that it breaks."""

    options_class = FileOptions
    made: type[FileStore] = FileStore
    parts = ("made",)

    def make_store(self, context: Any) -> Any:
        return self.made(context)


class Mutant(Judged, StoreContract):
    """It shows when writers race or are killed."""


class Hasty(FileStore):
    """A page has its name before it is whole."""

    def write(self, key: bytes, page: Sequence[memoryview]) -> bool:
        if not self._path(key).exists():
            self._write_pieces(self._path(key), b"".join(page))
        return True


class Replacing(FileStore):
    """The last whole page of a key takes the place of the first."""

    def _publish(self, aside: Path, path: Path) -> None:
        os.replace(aside, path)


@breaks(Mutant, "STORE-2")
class TestWritesUnderThePagesName(Hasty):
    """A writer that is killed leaves a part of a page."""


@breaks(Mutant, "STORE-2")
class TestRenames(Replacing):
    """Of two writers the second one wins."""


@breaks(Mutant, "STORE-2")
class TestMakesItsFolderWithoutALock(FileStore):
    """Two ends that are opened at once both find no folder, and the second fails to make it."""

    def __init__(self, context: Any) -> None:
        self._folder = Path(context.options.path, "pages")
        if not self._folder.exists():
            time.sleep(0.001)
            self._folder.mkdir()


class BoundedStore(FileStore):
    """The same with a budget, which the ends of a process count together."""

    sizes: ClassVar[defaultdict[Path, dict[bytes, int]]] = defaultdict(dict)
    lock = threading.RLock()

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._budget = context.buffer_size
        self._sizes = self.sizes[self._folder]

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self._sizes for key in keys]

    def read(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        with self.lock:
            if key not in self._sizes:
                return None
            self._sizes[key] = self._sizes.pop(key)  # evicted last
        return super().read(key, into)

    def write(self, key: bytes, page: Sequence[memoryview]) -> bool:
        nbytes = sum(map(len, page))
        if nbytes > self._budget:
            raise CapacityError("it is larger than the budget")
        with self.lock:
            while sum(self._sizes.values()) + nbytes > self._budget:
                self._evict(next(iter(self._sizes)))
            super().write(key, page)
            self._sizes.setdefault(key, nbytes)
        return True

    def _evict(self, key: bytes) -> None:
        self.remove([key])

    def remove(self, keys: Sequence[bytes]) -> None:
        with self.lock:
            super().remove(keys)
            for key in keys:
                self._sizes.pop(key, None)

    def usage(self) -> Usage:
        with self.lock:
            used = sum(self._sizes.values())
            return Usage(num_pages=len(self._sizes), used_bytes=used, budget_bytes=self._budget)


class BoundedMutant(Judged, StoreContract):
    """One fault of a store with a budget, which has a control of its own."""

    use_granularity_s = 0.0
    made = BoundedStore


@breaks(BoundedMutant, "STORE-6")
class TestHidesWhatItEvicts(BoundedStore):
    """Pages that are evicted are not found and not counted any more, and their files stay."""

    def _evict(self, key: bytes) -> None:
        del self._sizes[key]


class TestKeepsItsBudget(BoundedMutant):
    """The store with a budget as it is."""

    is_control = True


class TestHasNoFault(Mutant):
    """The store over files as it is."""

    is_control = True


class Methods(Judged, BlockingStoreContract):
    """One fault of the store's methods, which are called one by one."""


@breaks(Methods, "STORE-1")
class TestFillsTheFirstBufferOnly(FileStore):
    """The others keep what was in them."""

    def read(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        return super().read(key, into[:1])


@breaks(Methods, "STORE-2")
class TestLeavesPartsWhenKilled(Hasty):
    """A reader sees a part of a page."""


@breaks(Methods, "STORE-2")
class TestTheLastWriteWins(Replacing):
    """A page that is there is replaced."""


@breaks(Methods, "STORE-9")
class TestRemovesTheFirstKeyOnly(FileStore):
    """The other pages stay."""

    def remove(self, keys: Sequence[bytes]) -> None:
        super().remove(keys[:1])


@breaks(Methods, "STORE-10")
class TestAnswersInItsOwnOrder(FileStore):
    """Answers are in the order of the files."""

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return sorted(super().has(keys))


class TestHasRightMethods(Methods):
    """The store over files as it is."""

    is_control = True
