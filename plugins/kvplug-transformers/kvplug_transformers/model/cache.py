"""The folder of a converted model. Does not import torch.

Layout: ``<cache>/models/<name>/`` with the files that transformers saves.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvplug import KvplugError

FORMAT = 1
"""The version of the conversion: a new number converts every cached model again."""


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


def make_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return ``folder``; call ``make(empty_folder)`` first unless it exists.

    Safe if several processes call it at once (one makes it, the others wait), and if the process is killed
    in the middle (a complete folder gets its name by one rename).

    Raises:
        OSError: the cache cannot be written; the message names KVPLUG_CACHE.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f".{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it when its holder dies
            for leftover in folder.parent.glob(f".{folder.name}.tmp-*"):  # of makers that were killed
                shutil.rmtree(leftover, ignore_errors=True)
            if not folder.is_dir():
                prefix = f".{folder.name}.tmp-"
                with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as fresh:
                    content = Path(fresh, "new")
                    content.mkdir()
                    make(content)
                    content.rename(folder)
    except KvplugError:
        raise  # of ``make``, and some are OSErrors
    except OSError as e:
        raise OSError(
            f"cannot keep a model in {folder}: {e.strerror or e}; set KVPLUG_CACHE to another folder"
        ) from e
    return folder
