"""Tries the config's stores: opens them, asks for an unknown page, and puts one where that is permitted."""

from __future__ import annotations

import logging
import os
import re
import secrets
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import attrs

from kvplug.assembly.examination.finding import Finding
from kvplug.assembly.examination.limits import MIB
from kvplug.assembly.links import LinkSettings
from kvplug.assembly.resolve import ResolvedConfig
from kvplug.assembly.stores import StoreOpener
from kvplug.config import Role
from kvplug.config.units import bytes_in_words
from kvplug.errors import AuthenticationError, ConfigError, KvplugError, PluginError, TimeoutError
from kvplug.net.deadline import Deadline
from kvplug.net.peer_text import peer_text
from kvplug.net.threads import BackgroundThread
from kvplug.transport.spec import Kind, StoreSpec
from kvplug.transport.store.format import opaque_format
from kvplug.transport.store.keys import Series
from kvplug.transport.store.memory import PageBuffers
from kvplug.transport.store.page_folder import check_private
from kvplug.transport.store.results import MissReason, PutReason
from kvplug.transport.store.store import PageRequest, Store

_PAGE_BYTES: Final = 4096
_NAMESPACE: Final = b"kvplug doctor"
_STORE_S: Final = 5.0
_LEAST_S: Final = 0.2
_MOST_SAID: Final = 8
_FREE_NEEDED: Final = 64 * MIB
_PROMPT_TOKENS: Final = 8192
_PROMPTS: Final = 2
"""So many of them should fit."""


def of_stores(
    resolved: ResolvedConfig, deadline: Deadline, *, write: bool, token_bytes: int | None = None
) -> Iterator[Finding]:
    """Each store that an engine with this config opens. ``write``: put a page of the doctor's own, too.
    ``token_bytes``: the KV of one token, to compare the budget with a prompt."""
    config = resolved.config
    if not resolved.uses_stores or (config.role is Role.CONSUMER and not config.sources.get("stores")):
        return
    for name in config.stores:
        try:
            spec = resolved.registry.get(Kind.STORE, name)
        except PluginError:
            continue  # a finding of the config
        if not spec.run_probe().viable:
            continue  # a finding of the config
        options = resolved.options_of(spec)
        path = getattr(options, "path", None)
        if not isinstance(path, str) or not path or os.path.isfile(os.path.expanduser(path)):
            yield from _compared(_tried(resolved, spec, deadline, write), token_bytes)
            continue
        folder = Path(os.path.abspath(os.path.expanduser(path)))
        at = next(each for each in (folder, *folder.parents) if each.exists())
        rooms = list(_rooms(spec, options, folder, at))
        yield from rooms
        if any(each.verdict == "problem" for each in rooms):
            continue
        with tempfile.TemporaryDirectory(prefix=".kvplug-doctor-", dir=at, ignore_cleanup_errors=True) as own:
            found = _tried(_with_path(resolved, spec, f"{own}/pages"), spec, deadline, write)
            yield from _compared(found, token_bytes)


def _compared(tried: tuple[Finding, int | None], token_bytes: int | None) -> Iterator[Finding]:
    """A store that was tried; and its budget, beside what a prompt takes."""
    found, budget = tried
    yield found
    if budget is None or token_bytes is None:
        return
    prompt, name = _PROMPT_TOKENS * token_bytes, found.what.partition(":")[0]
    what = f"{name}: a prompt of {_PROMPT_TOKENS:,} tokens takes {bytes_in_words(prompt)} of"
    what += f" {bytes_in_words(budget)}"
    if budget >= _PROMPTS * prompt:
        yield Finding(topic="stores", verdict="ok", what=what)
        return
    yield Finding(
        topic="stores",
        verdict="note",
        what=what,
        why=("longer prompts, or several at once, are not loaded whole",),
        change=f'options.{name}.size = "{-(-_PROMPTS * prompt // MIB)} MiB"    (or more)',
    )


def _with_path(resolved: ResolvedConfig, spec: StoreSpec, path: str) -> ResolvedConfig:
    """The same config, but for the folder of one store: the one of the config is not touched."""
    config = resolved.config
    given = {**config.options, spec.name: {**config.options.get(spec.name, {}), "path": path}}
    return ResolvedConfig(attrs.evolve(config, options=given), resolved.registry)


def _rooms(spec: StoreSpec, options: Any, folder: Path, at: Path) -> Iterator[Finding]:
    """Of a store in a folder (its option ``path``): whether that can be written, and what is free.

    ``at``: the folder, or the nearest one around it that is there.
    """
    line = f"options.{spec.name}.path = ..."
    pages = [str(each) for each in folder.glob("*/pages")]  # as the stores "fs" and "nixl" have them
    try:
        for own in (*map(os.path.dirname, pages), *pages):
            check_private(own, f"options.{spec.name}.path")
        if at == folder:
            check_private(str(folder), f"options.{spec.name}.path", is_given=True)
    except (ConfigError, OSError) as e:
        what = f"{spec.name}: the store does not start"
        yield Finding(topic="stores", verdict="problem", what=what, why=(str(e),), change=line)
        return
    if fault := _why_not_written(at):
        why, change = fault
        yield Finding(
            topic="stores",
            verdict="problem",
            what=f"{spec.name}: {at} cannot be written",
            why=(why, "pages are not kept there"),
            change=f"{change}    (or {line}, another folder)",
        )
        return
    try:
        room = os.statvfs(at)
    except OSError as e:
        yield Finding(
            topic="stores", verdict="problem", what=f"{spec.name}: {at}: {e.strerror or e}", change=line
        )
        return
    free, budget = room.f_bavail * room.f_frsize, getattr(options, "size", None)
    what = f"{spec.name}: {bytes_in_words(free)} are free at {at}"
    if at != folder:
        what += f", where {folder.relative_to(at)} is made when an engine starts"
    if room.f_files and not room.f_favail:
        why = "no more files can be made there (no inodes are free): pages are not kept"
        change = f"{line}    (on another disk), or delete what is not needed"
        yield Finding(topic="stores", verdict="problem", what=what, why=(why,), change=change)
    elif free < _FREE_NEEDED:
        why = "the disk is full: pages are not kept"
        if free >= MIB:
            why = f"less than {bytes_in_words(_FREE_NEEDED)} is hardly a page of a large model"
        change = f"{line}    (on another disk), or delete what is not needed"
        yield Finding(topic="stores", verdict="problem", what=what, why=(why,), change=change)
    elif isinstance(budget, int) and budget > room.f_blocks * room.f_frsize:
        why = f"the budget of {bytes_in_words(budget)} is more than the disk has"
        change = f'options.{spec.name}.size = "{free // 2 // MIB} MiB"'
        yield Finding(topic="stores", verdict="note", what=what, why=(why,), change=change)
    else:
        yield Finding(topic="stores", verdict="ok", what=what)


def _why_not_written(folder: Path) -> tuple[str, str] | None:
    """Why no file can be made in the folder, and what to change; ``None``: one can be."""
    if not folder.is_dir():
        return "it is no folder", f"rm {folder}"
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return "its file system is mounted read-only", "mount it for writing, without :ro or readOnly: true"
    if not os.access(folder, os.W_OK | os.X_OK):
        status, user = os.stat(folder), os.geteuid()
        mode = status.st_mode & 0o777
        why = f"user {user} may not: it belongs to user {status.st_uid}, with mode {mode:o}"
        return why, f"chown {user} {folder}"
    return None


class _Said(logging.Handler):
    """What is logged while a store is tried: it says why the store does not work."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.lines) < _MOST_SAID:
            self.lines.append(peer_text(record.getMessage()))


def _tried(
    resolved: ResolvedConfig, spec: StoreSpec, deadline: Deadline, write: bool
) -> tuple[Finding, int | None]:
    """The finding, and the store's budget where it answered."""
    said = _Said()
    logging.getLogger().addHandler(said)
    try:
        found, budget = _found(resolved, spec, deadline, write)
    finally:
        logging.getLogger().removeHandler(said)
    if found.verdict == "ok":
        return found, budget
    why = tuple(dict.fromkeys((*found.why, *said.lines)))
    return attrs.evolve(found, why=why, change=found.change or _line_for(spec, " ".join(why))), None


_ADDRESSES: Final = ("address", "contact", "master", "endpoint", "path")
"""Names that plugins give to the option that says where a store is."""


def _option_names(spec: StoreSpec) -> tuple[str, ...]:
    options = spec.load_options()
    return tuple(attrs.fields_dict(options)) if options is not None else ()


def _line_for(spec: StoreSpec, said: str) -> str:
    """The options of the store that are named in what it said of its failure; its address where none is."""
    names = _option_names(spec)
    words = {each.rstrip(".").removeprefix(f"options.{spec.name}.") for each in re.findall(r"[\w.]+", said)}
    # A plain word of a sentence, such as "user" or "size", is no name of an option by itself.
    words = {each for each in words if "_" in each or f"options.{spec.name}.{each}" in said}
    if "password_file" in words:
        words.add("user")
    chosen = [each for each in names if each in words]
    if chosen:
        return ", ".join(f"options.{spec.name}.{each}" for each in chosen)
    for each in _ADDRESSES:
        if each in names:
            return f"options.{spec.name}.{each}: where the store is; or start what listens there"
    return f"options.{spec.name}    (`kvplug list --options {spec.name}` shows what there is)"


def _found(
    resolved: ResolvedConfig, spec: StoreSpec, deadline: Deadline, write: bool
) -> tuple[Finding, int | None]:
    opener = StoreOpener(LinkSettings(resolved=resolved))
    left = deadline.remaining()
    within = _STORE_S if left is None else min(_STORE_S, left)
    if within < _LEAST_S:
        late = Finding(
            topic="stores",
            verdict="note",
            what=f"{spec.name}: it was not tried: the time of the doctor was over",
            why=("stores before it, or a busy host, took it",),
            change="--timeout 60",
        )
        return late, None
    trial = _Trial(spec, opener, within, write)
    thread = BackgroundThread(trial.run, name="kvplug-doctor-store", stop=trial.stop)
    thread.start()
    thread.join(within + 1.0)
    if thread.is_alive():
        trial.stop()
        return _dead(spec, f"it did not answer within {within:.3g} s"), None
    return trial.finding, trial.budget_bytes


class _Trial:
    """One store, in a thread of its own: code of a plugin may not return."""

    def __init__(self, spec: StoreSpec, opener: StoreOpener, within: float, write: bool) -> None:
        self._spec = spec
        self._opener = opener
        self._within = within
        self._write = write
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._stopped = False
        self.finding = _dead(spec, "it was not tried")
        self.budget_bytes: int | None = None

    def stop(self) -> None:
        with self._lock:
            self._stopped, store = True, self._store
        if store is not None:
            store.abort()

    def run(self) -> None:
        try:
            store = self._opener.open(self._spec.name)
        except AuthenticationError as e:
            change = "KVPLUG_SECRET or secret_file: the same at both ends"
            self.finding = attrs.evolve(_dead(self._spec, str(e)), change=change)
            return
        except KvplugError as e:
            self.finding = _dead(self._spec, str(e))
            return
        except Exception as e:
            self.finding = _dead(self._spec, f"{type(e).__name__}: {e}")
            return
        with self._lock:
            self._store, stopped = store, self._stopped
        if stopped:
            store.abort()
            return
        try:
            self.finding = self._use(store)
        except KvplugError as e:
            self.finding = _dead(self._spec, str(e))
        except Exception as e:
            self.finding = _dead(self._spec, f"{type(e).__name__}: {e}")
        finally:
            store.abort()

    def _use(self, store: Store) -> Finding:
        series = Series(opaque_format(_PAGE_BYTES), _NAMESPACE, store.seal.id)
        key = series.key_of(secrets.token_bytes(32))
        pages = PageBuffers.empty(series.format, 1)
        request = PageRequest(
            series=series, keys=(key,), identities=(_NAMESPACE,), memory=pages, is_use=False
        )
        miss = self._got(store, request)
        if miss not in (None, MissReason.ABSENT):
            return _dead(self._spec, f"a page was asked for, and the answer was {miss.value!r}")
        usage = store.usage()
        self.budget_bytes = usage.budget_bytes
        budget = "no limit of its own" if usage.budget_bytes is None else bytes_in_words(usage.budget_bytes)
        what = f"{self._spec.name}: it answers; {usage.num_pages} pages, budget {budget}"
        if not self._write:
            return Finding(topic="stores", verdict="ok", what=what)
        content = secrets.token_bytes(_PAGE_BYTES)
        pages.rows().row(0)[:] = content
        (refused,) = store.submit_put(request, timeout=self._within).wait(self._within + 1)
        try:
            if refused is not None:
                usage = store.usage()
                is_used = (
                    usage.budget_bytes is not None and usage.used_bytes + _PAGE_BYTES > usage.budget_bytes
                )
                return self._not_kept(refused, is_used=is_used)
            got = PageBuffers.empty(series.format, 1)
            miss = self._got(store, attrs.evolve(request, memory=got))
            if miss is not None:
                return _dead(self._spec, f"a page was put, and is {miss.value!r} when it is asked for")
            if bytes(got.rows().row(0)) != content:
                return _dead(self._spec, "a page that was put has other bytes when it is got")
        finally:
            store.submit_remove((key,), timeout=self._within).wait(self._within + 1)
        return Finding(topic="stores", verdict="ok", what=f"{what}; a page was put, got and removed")

    def _got(self, store: Store, request: PageRequest) -> MissReason | None:
        job = store.submit_get(request, timeout=self._within)
        (miss,) = job.wait(self._within + 1)
        if not job.wait_settled(1.0):
            raise TimeoutError("a page is still being copied")
        return miss

    def _not_kept(self, reason: PutReason, is_used: bool) -> Finding:
        name = self._spec.name
        why, change = "", f"options.{name}: who may write there"
        if reason in (PutReason.NO_ROOM, PutReason.TOO_LARGE) and is_used:
            why = "its budget is used by pages that may not be evicted"
            change = f"options.{name}.size = ...    (or delete what is not needed)"
        elif reason in (PutReason.NO_ROOM, PutReason.TOO_LARGE):
            why = "what is behind it is full, such as a server or a disk"
            change = "a higher limit there: raise maxmemory of a Redis server"
            if "size" in _option_names(self._spec):
                change += f"; or lower options.{name}.size"
        what = f"{name}: a page was not kept: {reason.value}"
        return Finding(topic="stores", verdict="problem", what=what, why=(why,) if why else (), change=change)


def _dead(spec: StoreSpec, why: str) -> Finding:
    return Finding(
        topic="stores",
        verdict="problem",
        what=f"{spec.name}: the store does not work",
        why=(why, "every load from it is a miss, and nothing is kept in it"),
    )
