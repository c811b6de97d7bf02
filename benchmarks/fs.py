"""What the store "fs" costs: gets and puts of pages, beside a plain parallel read and write of as many bytes.

    python benchmarks/fs.py [--folder DIR] [--sizes 64KiB,512KiB,4MiB] [--rounds N] [--markdown FILE]

The plain read opens the same files with the same number of threads and reads them into memory that is there
already. "and hash" computes the checksums of the same bytes, too. "and copy" also copies them once more, as
the store does, which reads a page into memory of its own first. The plain write makes as many
files, and renames each. All take turns within a round, in an order that changes, without the first. The
figures are medians, the shares medians of the shares within a round, with their quartiles.

Warm: the files are in the page cache. Cold: they are written to the disk, and the kernel is asked to drop
them (posix_fadvise), before each reading; then the figures are the disk's. A file system in memory is never
cold.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import harness
import xxhash

from kvplug.config.units import parse_bytes
from kvplug.transport.store.folder.files import PageFolder
from kvplug_fs.store import LAYOUT


class Pages(harness.Pages):
    """Pages of one size in a store, and the plain reads and writes beside it."""

    def __init__(self, stack: ExitStack, folder: Path, nbytes: int, total: int, threads: int) -> None:
        super().__init__(nbytes, total, threads)
        self._scratch = [memoryview(bytearray(nbytes + 4096)) for _ in range(threads)]
        self._folder = folder
        options = {"path": str(folder / "kv"), "size": 8 * self.total, "threads": threads}
        self.store = harness.opened(stack, options, name="fs")
        self.keep(self.store)
        files = PageFolder(options["path"], LAYOUT, "path")
        self._paths = [files.path_of(key) for key in self.kept[self.store].keys]

    def read(self, hashes: bool = False, copies: bool = False) -> None:
        def work(first: int) -> None:
            scratch = self._scratch[first]
            for index in range(first, self.count, self.threads):
                row = self.rows.row(index)
                into = scratch[: self.nbytes] if copies else row
                fd = os.open(self._paths[index], os.O_RDONLY)
                try:
                    header = os.fstat(fd).st_size - self.nbytes
                    assert os.preadv(fd, [scratch[-header:], into], 0) == header + self.nbytes
                finally:
                    os.close(fd)
                if hashes:
                    xxhash.xxh3_64_digest(into)
                if copies:
                    row[:] = into

        self.each(work, range(self.threads))

    def make_cold(self) -> None:
        for path in self._paths:
            fd = os.open(path, os.O_RDWR)
            try:
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    def write(self) -> Callable[[], None]:
        folder = Path(tempfile.mkdtemp(dir=self._folder))

        def work(index: int) -> None:
            path = folder / str(index)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                assert os.write(fd, self.rows.row(index)) == self.nbytes
            finally:
                os.close(fd)
            os.rename(path, f"{path}.page")

        self.each(work)
        return lambda: shutil.rmtree(folder)


def rows_of(text: str, pages: Pages, rounds: int) -> list[list[str]]:
    reads = {
        "fs": lambda: pages.get(pages.store),
        "plain read": pages.read,
        "and hash": lambda: pages.read(hashes=True),
        "and copy": lambda: pages.read(hashes=True, copies=True),
    }
    taken = {
        "get, warm": harness.in_turns(reads, rounds),
        "get, cold": harness.in_turns(reads, rounds, pages.make_cold),
        "put": harness.in_turns({"fs": lambda: pages.put(pages.store), "plain write": pages.write}, rounds),
    }
    return [
        [text, what, *harness.beside(times, pages.total, "fs", name)[1:]]
        for what, times in taken.items()
        for name in times
        if name != "fs"
    ]


def main() -> None:
    parser = harness.page_parser(__doc__, "64KiB,512KiB,4MiB", "256MiB")
    parser.add_argument("--folder", type=Path, help="where the files are made, not among temporary files")
    parser.add_argument("--threads", type=int, default=4)
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="kvplug-", dir=given.folder) as folder:
        for text in given.sizes:
            own = Path(folder, text)
            with ExitStack() as stack:
                stack.callback(functools.partial(shutil.rmtree, own))
                pages = Pages(stack, own, parse_bytes(text), given.total, given.threads)
                rows += rows_of(text, pages, given.rounds)
        where = f"{harness.machine(Path(folder))}, {given.threads} threads, {given.rounds} rounds."
    head = ["pages", "what", "fs, GB/s", "beside", "GB/s", "share", "quartiles"]
    harness.write(given, harness.table(head, rows), where)


if __name__ == "__main__":
    main()
