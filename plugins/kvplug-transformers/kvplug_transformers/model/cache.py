"""The folder of a converted model. Does not import torch.

Layout: ``<cache>/models/<name>/`` with the files that transformers saves, and ``manifest.json``, written
last, with every file's size and hash. A folder without a matching manifest is ignored and made again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

MANIFEST = "manifest.json"
FORMAT = 1
"""The version of the conversion: a new number converts every cached model again."""

_CHUNK = 1 << 22


def cache_folder() -> Path:
    """``$KVPLUG_CACHE``, else ``kvplug`` in ``$XDG_CACHE_HOME``, else in ``~/.cache``."""
    if own := os.environ.get("KVPLUG_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvplug"


def folder_for(source: Path) -> Path:
    """The folder of this file's conversion, by the file's name, its size and its first bytes."""
    with source.open("rb") as file:
        head = file.read(1 << 16)
    key = hashlib.blake2b(head, digest_size=6, salt=f"{FORMAT}".encode()).hexdigest()
    return cache_folder() / "models" / f"{source.stem}-{source.stat().st_size}-{key}"


def is_complete(folder: Path) -> bool:
    """Whether every file in the manifest exists with its size and hash."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return bool(manifest["files"]) and all(
            (folder / name).stat().st_size == known["size"] and _hash(folder / name) == known["hash"]
            for name, known in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def make_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return ``folder``; call ``make(empty_folder)`` first unless it exists and is complete.

    Safe if several processes call it at once (one makes it, the others wait), and if the process is killed
    in the middle (a complete folder gets its name by one rename).

    Raises:
        OSError: the cache cannot be written; the message names KVPLUG_CACHE.
    """
    if is_complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f".{folder.name}.lock"):
            if not is_complete(folder):
                _make(folder, make)
    except OSError as e:
        raise OSError(
            f"cannot keep a model in {folder}: {e.strerror or e}; set KVPLUG_CACHE to another folder"
        ) from e
    return folder


def sweep(folder: Path) -> None:
    """Remove temporary files of killed processes that were making ``folder``, unless a process is making
    it now.
    """
    try:
        with (folder.parent / f".{folder.name}.lock").open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_leftovers(folder)
    except OSError:
        pass  # there are no leftovers, or a process is making it


def _make(folder: Path, make: Callable[[Path], None]) -> None:
    _remove_leftovers(folder)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=folder.parent))
    try:
        content = fresh / "new"
        content.mkdir()
        make(content)
        files = {
            str(path.relative_to(content)): {"size": path.stat().st_size, "hash": _hash(path)}
            for path in sorted(content.rglob("*"))
            if path.is_file()
        }
        (content / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": files}, indent=1))
        if folder.exists():
            # Processes that have mapped its files keep them: unlinking does not free mapped memory.
            folder.rename(fresh / "old")
        content.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """Remove temporary files of killed processes. The caller holds the lock, so no process is making it."""
    for leftover in folder.parent.glob(f".{folder.name}.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _hash(path: Path) -> str:
    import xxhash

    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """An exclusive lock that the kernel releases when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
