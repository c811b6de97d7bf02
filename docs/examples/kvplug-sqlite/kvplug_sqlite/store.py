"""The store "sqlite": pages of KV in an SQLite database."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence

from kvplug import CapacityError, ConfigError
from kvplug.transport import BlockingStore, PageSeal, Usage

_SCHEMA = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS pages (key BLOB PRIMARY KEY, series BLOB, cost INTEGER, used REAL, page BLOB);
CREATE INDEX IF NOT EXISTS by_use ON pages (used);
CREATE INDEX IF NOT EXISTS by_series ON pages (series);
CREATE TABLE IF NOT EXISTS total AS SELECT 0 AS pages, 0 AS bytes;
CREATE TRIGGER IF NOT EXISTS came AFTER INSERT ON pages
    BEGIN UPDATE total SET pages = pages + 1, bytes = bytes + NEW.cost; END;
CREATE TRIGGER IF NOT EXISTS went AFTER DELETE ON pages
    BEGIN UPDATE total SET pages = pages - 1, bytes = bytes - OLD.cost; END;
COMMIT;
"""
_BLOCK = 4096  # the size of a page of the database


class SqliteStore(BlockingStore):
    """Pages as rows of one table. The database makes each write atomic, and the first write of a key wins."""

    def __init__(self, context: BlockingStore.Context) -> None:
        os.makedirs(context.options.path, mode=0o700, exist_ok=True)
        folder = os.stat(context.options.path)
        if folder.st_uid != os.geteuid() or folder.st_mode & 0o022:
            raise ConfigError(
                f"options.sqlite.path: other users can write to {context.options.path}: chmod 700 it"
            )
        self._path = os.path.join(context.options.path, "pages.sqlite")
        self._size: int = context.options.size
        self._usage = Usage(num_pages=0, used_bytes=0, budget_bytes=self._size)
        os.close(os.open(self._path, os.O_CREAT, 0o600))  # headers contain prompts
        with self._database() as db:
            db.executescript(_SCHEMA)
            self._count(db)

    @contextlib.contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        """Open a connection for one call, so that threads and forked children do not share connections."""
        db = sqlite3.connect(self._path, timeout=10.0, isolation_level=None)
        try:
            db.execute("PRAGMA synchronous = OFF")  # checksums detect pages that a crash of the host damaged
            yield db
        finally:
            db.close()

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        query = "SELECT 1 FROM pages WHERE key = ?"
        with self._database() as db:
            return [db.execute(query, [key]).fetchone() is not None for key in keys]

    def read(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        with self._database() as db:
            row = db.execute("SELECT page FROM pages WHERE key = ?", [key]).fetchone()
            if row is None:
                return None
            if into:
                db.execute("UPDATE pages SET used = ? WHERE key = ?", [time.time(), key])
        page, at = memoryview(row[0]), 0
        for buffer in into:
            part = page[at : at + len(buffer)]
            buffer[: len(part)] = part
            at += len(buffer)
        return len(page)

    def write(self, key: bytes, page: Sequence[memoryview]) -> bool:
        whole = b"".join(page)
        cost = (len(whole) // _BLOCK + 2) * _BLOCK
        if cost > self._size:
            raise CapacityError(f"a page takes {cost} bytes, but the database may have {self._size}")
        header = PageSeal.split(whole)
        row = [key, header[1] if header else b"", cost, time.time(), whole]
        with self._database() as db:
            db.execute("BEGIN IMMEDIATE")  # other writers wait until the commit
            if not db.execute("SELECT 1 FROM pages WHERE key = ?", [key]).fetchone():
                while self._count(db).used_bytes + cost > self._size:
                    db.execute("DELETE FROM pages WHERE key = (SELECT key FROM pages ORDER BY used LIMIT 1)")
                db.execute("INSERT INTO pages VALUES (?, ?, ?, ?, ?)", row)
            self._count(db)
            db.execute("COMMIT")
        return True

    def remove(self, keys: Sequence[bytes]) -> None:
        with self._database() as db:
            db.executemany("DELETE FROM pages WHERE key = ?", [[key] for key in keys])
            self._count(db)

    def touch(self, keys: Sequence[bytes]) -> None:
        with self._database() as db:
            db.executemany("UPDATE pages SET used = ? WHERE key = ?", [[time.time(), key] for key in keys])

    def keys(self, series: bytes) -> list[bytes]:
        with self._database() as db:
            return [key for (key,) in db.execute("SELECT key FROM pages WHERE series = ?", [series])]

    def _count(self, db: sqlite3.Connection) -> Usage:
        count, used = db.execute("SELECT pages, bytes FROM total").fetchone()
        self._usage = Usage(num_pages=count, used_bytes=used, budget_bytes=self._size)
        return self._usage

    def usage(self) -> Usage:
        return self._usage
