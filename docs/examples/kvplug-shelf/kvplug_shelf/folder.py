"""The folder, in which the saving engine publishes KV and the loading engines find it.

::

    <folder>/<address>/current        names the epoch, and its model and layout
    <folder>/<address>/<epoch>/7.3    rank 3's KV of entry 7
    <folder>/<address>/<epoch>/7      the tokens of entry 7, written last: it can be found now

An epoch begins when the saving engine starts, and when it must invalidate its KV: ``current`` then names
another folder, and the old one is removed. Every file is written under another name first, so that no reader
sees half of it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Any

from kvplug import ConfigError, IntegrityError, KvplugError, TransportError
from kvplug.engine import ConnectorContext, EntryGoneError
from kvplug.net.wire import Limits, decode, encode
from kvplug.transport import NamedExhaustion

LIMITS = Limits(max_bytes=1 << 40)
DIGEST_BYTES = 16
READ = Path.read_bytes
"""Reads a file. Tests replace it, to make reading fail."""

Prompt = tuple[bytes, tuple[int, ...]]
"""What determines the KV: extra, and the tokens."""


def folder_of(context: ConnectorContext) -> Path:
    """The folder of this config's two engines.

    Raises:
        ConfigError: another user could write there.
    """
    given = context.options.folder
    base = Path(given) if given else Path(tempfile.gettempdir(), f"kvplug-shelf-{os.getuid()}")
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = base.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigError(f"options.shelf.folder: {base} can be written by others than this user")
    return base / re.sub(r"[^A-Za-z0-9]+", "-", context.config.control_address(0))


def form_of(context: ConnectorContext) -> str:
    """The facts that must be equal at two engines, so that KV means the same at both."""
    model, layout = context.model, context.cache.groups[0].layout
    parts: list[object] = [model.attention, model.num_layers, model.num_kv_heads, model.head_size]
    parts += [model.dtype, model.rope, model.window, model.quantisation, model.weights]
    parts += [layout.num_kv_heads, layout.head_size, layout.has_values, context.parallelism.num_workers]
    if layout.block_format:  # then a block is moved as it lies
        parts += [layout.axes, layout.block_format, layout.block_size]
    return repr(parts)


def write(path: Path, value: object) -> None:
    """Write a file atomically.

    Raises:
        EntryGoneError: its epoch has ended.
        TransportError: it cannot be written.
    """
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    data = encode(value, limits=LIMITS)
    try:
        with part.open("wb") as file:
            file.write(_digest(data))
            file.write(data)
        part.rename(path)
    except FileNotFoundError as e:
        raise EntryGoneError(f"{path.parent} has been removed") from e
    except OSError as e:
        part.unlink(missing_ok=True)
        raise TransportError(f"{path}: {e}") from e


def read(path: Path) -> Any:
    """Read a file and check its digest.

    Raises:
        EntryGoneError: it has been removed.
        IntegrityError: it is not what was written.
        TransportError: it cannot be read.
    """
    try:
        data = memoryview(READ(path))
    except FileNotFoundError as e:
        raise EntryGoneError(f"{path} has been removed") from e
    except OSError as e:
        raise TransportError(f"{path}: {e}") from e
    if data[:DIGEST_BYTES] != _digest(data[DIGEST_BYTES:]):
        raise IntegrityError(f"{path} is not what was written: it is not used")
    return decode(data[DIGEST_BYTES:], limits=LIMITS)


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


class Published:
    """The folder at the saving engine, which owns it."""

    def __init__(self, folder: Path, form: str, max_bytes: int) -> None:
        self._folder, self._form, self._max_bytes = folder, form, max_bytes
        self._count = 0
        self.epoch: Path
        shutil.rmtree(folder, ignore_errors=True)  # of an engine that was killed
        folder.mkdir(mode=0o700)
        self.begin()

    def begin(self) -> None:
        """Begin a new epoch. Entries that were saved before are no longer found."""
        old = getattr(self, "epoch", None)
        self.epoch = self._folder / uuid.uuid4().hex
        self.epoch.mkdir(mode=0o700)
        write(self._folder / "current", {"epoch": self.epoch.name, "form": self._form})
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def reserve(self) -> Path:
        """The next entry's name."""
        self._count += 1
        return self.epoch / str(self._count)

    @NamedExhaustion("publishing an entry")
    def add(self, entry: Path, prompt: Prompt) -> None:
        """Publish an entry that every rank has saved. Removes the oldest entries if there is no room."""
        if entry.parent != self.epoch:
            return  # forgotten meanwhile
        write(entry, list(prompt))
        sizes = {int(path.name.partition(".")[0]): 0 for path in self.epoch.iterdir()}
        for path in self.epoch.iterdir():
            sizes[int(path.name.partition(".")[0])] += path.stat().st_size
        total = sum(sizes.values())
        for number in sorted(sizes):
            if total <= self._max_bytes:
                break
            total -= sizes[number]
            self.remove(self.epoch / str(number))

    @NamedExhaustion("removing an entry")
    def remove(self, entry: Path) -> None:
        entry.unlink(missing_ok=True)  # first: a found entry must be loadable
        for part in entry.parent.glob(f"{entry.name}.*"):
            part.unlink(missing_ok=True)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class Catalogue:
    """The folder at a loading engine: which prompts it has."""

    def __init__(self, folder: Path, form: str) -> None:
        self._folder, self._form = folder, form
        self._known: dict[Path, Prompt] = {}

    def match(self, extra: bytes, tokens: tuple[int, ...]) -> tuple[Path | None, int]:
        """The entry that shares the longest prefix, and how many tokens that is."""
        best: tuple[Path | None, int] = (None, 0)
        for entry, (of, held) in self._look().items():
            if of == extra and (count := _common(tokens, held)) > best[1]:
                best = entry, count
        return best

    def _look(self) -> dict[Path, Prompt]:
        epoch, names = self._folder, list[str]()
        try:
            current = read(self._folder / "current")
            if current["form"] == self._form:
                epoch = self._folder / current["epoch"]
                names = os.listdir(epoch)
        except (KvplugError, OSError):
            pass  # no engine saves, or no longer, or there is no free descriptor: a miss
        entries = {epoch / name for name in names if "." not in name}
        self._known = {entry: prompt for entry, prompt in self._known.items() if entry in entries}
        for entry in entries - self._known.keys():
            try:
                extra, tokens = read(entry)
            except KvplugError:
                continue  # removed meanwhile, or damaged: a miss
            self._known[entry] = (extra, tuple(tokens))
        return self._known


def _common(ours: tuple[int, ...], theirs: tuple[int, ...]) -> int:
    """Length of the common prefix. Tokens are compared, not hashes of them."""
    for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return index
    return min(len(ours), len(theirs))
