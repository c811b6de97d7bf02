"""Stores over folders, and pages for them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvplug.transport import Credentials, FolderStore, Store
from kvplug.transport.store.folder.files import PageFolder, cost_of
from kvplug_fs.options import FolderOptions
from kvplug_fs.store import LAYOUT, make_store


def key_of(name: object) -> bytes:
    """A key of 32 bytes."""
    return repr(name).encode().rjust(32, b"\0")[-32:]


def page_of(name: object, nbytes: int = 10_000) -> list[memoryview]:
    """A page in two buffers, with the name at its beginning and its end."""
    said = repr(name).encode()
    whole = said + bytes(nbytes - 2 * len(said)) + said
    return [memoryview(whole[:100]), memoryview(whole[100:])]


def open_store(path: Path | str, **options: Any) -> FolderStore:
    """A blocking store over the folder."""
    given = FolderOptions(path=str(path), **options)
    made = make_store(Store.Context(options=given, credentials=Credentials()))
    assert isinstance(made, FolderStore)
    return made


def folder_at(path: Path | str) -> PageFolder:
    return PageFolder(str(path), LAYOUT, "path")


def read(store: FolderStore, name: object) -> bytes | None:
    """The page of that name."""
    length = store.read(key_of(name), ())
    if length is None:
        return None
    page = bytearray(length)
    if store.read(key_of(name), (memoryview(page),)) is None:
        return None  # it was evicted in between
    return bytes(page)


def write(store: FolderStore, name: object, nbytes: int = 10_000) -> bool:
    return store.write(key_of(name), page_of(name, nbytes))


def used_in(path: Path | str) -> int:
    """Bytes that all pages use, and those that are being written."""
    folder = folder_at(path)
    found = [entry for _, entry in folder.all_pages()] + [entry for entry, _ in folder.written_aside()]
    used = 0
    for entry in found:
        try:
            status = os.stat(entry.path)
        except FileNotFoundError:
            continue
        if status.st_size and (status.st_nlink == 1 or "/pages/" in entry.path):
            used += cost_of(status.st_size)
    return used


def aside_in(path: Path | str) -> list[str]:
    """Names of the files that are being written, or were when their writers died."""
    return [entry.name for entry, _ in folder_at(path).written_aside()]


def page_path(path: Path | str, key: bytes) -> Path:
    """Where the page of that key lies."""
    return Path(path, "v1", "pages", key.hex()[:2], key.hex()[2:])


def scan(store: FolderStore) -> None:
    """Search the folder now."""
    store.sweeper.scan_now()
