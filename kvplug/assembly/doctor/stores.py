"""Tries the config's stores and its directory: code of plugins, in threads that may be left behind."""

from __future__ import annotations

import logging
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TypeVar

import attrs

from kvplug.assembly.examination.finding import Finding, from_fault, note, ok, problem
from kvplug.assembly.examination.host import MIB
from kvplug.assembly.links import LinkSettings
from kvplug.assembly.resolve import ResolvedConfig
from kvplug.assembly.stores import StoreOpener
from kvplug.config.config import Role, directory_of
from kvplug.config.options import option_fields
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

T = TypeVar("T")

THREAD: Final = "kvplug-doctor"
"""The name of threads that run code of plugins."""
_PAGE_BYTES: Final = 4096
_NAMESPACE: Final = b"kvplug doctor"
_MOST_S: Final = 5.0
_LEAST_S: Final = 0.2
_MAX_LOGGED: Final = 8
_FREE_NEEDED: Final = 64 * MIB
_PROMPT_TOKENS: Final = 8192
_PROMPTS: Final = 2
"""So many of them should fit into a store."""


def _attempt(call: Callable[[], T], seconds: float, stop: Callable[[], object]) -> T:
    """The result of a call that may not return. It is stopped when the time is over.

    Raises:
        TimeoutError: the time is over.
        Exception: whatever the call raises.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as e:
            future.set_exception(e)

    thread = BackgroundThread(run, name=THREAD, stop=stop)
    thread.start()
    thread.join(seconds)
    if not future.done():
        stop()
        raise TimeoutError(f"it did not answer within {seconds:.3g} s")
    return future.result()


def of_directory(resolved: ResolvedConfig, deadline: Deadline) -> Iterator[Finding]:
    """Whether the directory of engines in ``peers`` answers."""
    url = resolved.config.directory
    if url is None:
        return
    name = directory_of(url) or ""
    seconds = min(_MOST_S, deadline.remaining() or _MOST_S)

    def entries() -> int:
        spec = resolved.registry.get(Kind.DIRECTORY, name)
        directory = resolved.make(spec, url=url, timeout_s=seconds)
        try:
            return len(directory.entries())
        finally:
            directory.close()

    try:
        count = _attempt(entries, seconds + 1.0, lambda: None)
    except Exception as e:
        yield problem(
            "peers",
            f"the directory {name!r} does not answer",
            f"{type(e).__name__}: {e}",
            "this engine finds no other engine, and loads nothing from them",
            change="peers: the address of the directory; or start what listens there",
        )
    else:
        yield ok("peers", f"the directory {name!r} answers; workers that are announced: {count}")


def of_stores(
    resolved: ResolvedConfig, deadline: Deadline, *, write: bool, token_bytes: int | None = None
) -> Iterator[Finding]:
    """Each store that an engine with this config opens: opened, and asked for a page that does not exist.

    Args:
        write: also put a page of the doctor's own, get it and remove it.
        token_bytes: the KV of one token, to compare the budget with a prompt.
    """
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
            yield from _tried(resolved, spec, deadline, write, token_bytes)
            continue
        folder = Path(os.path.abspath(os.path.expanduser(path)))
        at = next(each for each in (folder, *folder.parents) if each.exists())
        room = _of_folder(spec, options, folder, at)
        yield room
        if room.verdict == "problem":
            continue
        with tempfile.TemporaryDirectory(prefix=".kvplug-doctor-", dir=at, ignore_cleanup_errors=True) as own:
            given = {**config.options.get(spec.name, {}), "path": f"{own}/pages"}
            other = attrs.evolve(config, options={**config.options, spec.name: given})
            moved = ResolvedConfig(other, resolved.registry)
            yield from _tried(moved, spec, deadline, write, token_bytes)


# -- a folder ------------------------------------------------------------------------------------------


def _of_folder(spec: StoreSpec, options: Any, folder: Path, at: Path) -> Finding:
    """Whether the folder of a store (its option ``path``) can be written, and what is free.

    ``at``: the folder, or the nearest one around it that exists.
    """
    line = f"options.{spec.name}.path = ..."
    pages = [str(each) for each in folder.glob("*/pages")]  # as the stores "fs" and "nixl" have them
    try:
        for own in (*map(os.path.dirname, pages), *pages):
            check_private(own, f"options.{spec.name}.path")
        if at == folder:
            check_private(str(folder), f"options.{spec.name}.path", is_given=True)
    except (ConfigError, OSError) as e:
        return problem("stores", f"{spec.name}: the store does not start", str(e), change=line)
    if fault := _why_not_written(at):
        why, change = fault
        what, change = f"{spec.name}: {at} cannot be written", f"{change}    (or {line}, another folder)"
        return problem("stores", what, why, "pages are not kept there", change=change)
    room = os.statvfs(at)
    free, budget = room.f_bavail * room.f_frsize, getattr(options, "size", None)
    what = f"{spec.name}: {bytes_in_words(free)} are free at {at}"
    if free < _FREE_NEEDED:
        change = f"{line}    (another folder), or delete what is not needed"
        return problem("stores", what, "the disk is full: pages are not kept", change=change)
    if isinstance(budget, int) and budget > room.f_blocks * room.f_frsize:
        why = f"the budget of {bytes_in_words(budget)} is more than the disk has"
        change = f'options.{spec.name}.size = "{free // 2 // MIB} MiB"'
        return note("stores", what, why, change=change)
    return ok("stores", what)


def _why_not_written(folder: Path) -> tuple[str, str] | None:
    """Why no file can be made in the folder, and what to change; ``None``: one can be."""
    if not folder.is_dir():
        return "it is not a folder", f"rm {folder}"
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return "its file system is mounted read-only", "mount it for writing, without :ro or readOnly: true"
    if not os.access(folder, os.W_OK | os.X_OK):
        status, user = os.stat(folder), os.geteuid()
        mode = status.st_mode & 0o777
        why = f"user {user} may not write there: it belongs to user {status.st_uid}, with mode {mode:o}"
        return why, f"chown {user} {folder}"
    return None


# -- a store -------------------------------------------------------------------------------------------


class _Warnings(logging.Handler):
    """What is logged while a store is tried: it says why the store does not work."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.lines) < _MAX_LOGGED:
            self.lines.append(peer_text(record.getMessage()))


def _tried(
    resolved: ResolvedConfig, spec: StoreSpec, deadline: Deadline, write: bool, token_bytes: int | None
) -> Iterator[Finding]:
    left = deadline.remaining()
    seconds = _MOST_S if left is None else min(_MOST_S, left)
    if seconds < _LEAST_S:
        what = f"{spec.name}: it was not tried: the time of the doctor was over"
        yield note("stores", what, "stores before it, or a busy host, took it", change="--timeout 60")
        return
    trial = _Trial(resolved, spec, seconds, write)
    warnings = _Warnings()
    logging.getLogger().addHandler(warnings)
    try:
        found = _attempt(trial.run, seconds + 1.0, trial.stop)
    except AuthenticationError as e:
        found = trial.failed(str(e), change="KVPLUG_SECRET or secret_file: the same at both ends")
    except ConfigError as e:
        found = trial.failed(*e.faults, change=from_fault(e.faults[0]).change)
    except KvplugError as e:
        found = trial.failed(str(e), change=e.change)
    except Exception as e:
        found = trial.failed(f"{type(e).__name__}: {e}")
    finally:
        logging.getLogger().removeHandler(warnings)
    if found.verdict != "ok":
        found = attrs.evolve(found, why=tuple(dict.fromkeys((*found.why, *warnings.lines))))
    yield found
    if found.verdict == "ok" and trial.budget_bytes is not None and token_bytes is not None:
        yield _beside_a_prompt(spec.name, trial.budget_bytes, _PROMPT_TOKENS * token_bytes)


def _beside_a_prompt(name: str, budget: int, prompt: int) -> Finding:
    what = f"{name}: a prompt of {_PROMPT_TOKENS:,} tokens takes {bytes_in_words(prompt)} of"
    what += f" {bytes_in_words(budget)}"
    if budget >= _PROMPTS * prompt:
        return ok("stores", what)
    change = f'options.{name}.size = "{-(-_PROMPTS * prompt // MIB)} MiB"    (or more)'
    return note("stores", what, "longer prompts, or several at once, are not loaded whole", change=change)


class _Trial:
    """One store, opened and used."""

    def __init__(self, resolved: ResolvedConfig, spec: StoreSpec, seconds: float, write: bool) -> None:
        self._opener = StoreOpener(LinkSettings(resolved=resolved))
        self._spec = spec
        self._seconds = seconds
        self._write = write
        self._store: Store | None = None
        self._options = option_fields(cls) if (cls := spec.load_options()) is not None else {}
        self.budget_bytes: int | None = None
        """Known when the store has answered."""

    def stop(self) -> None:
        if self._store is not None:
            self._store.abort()

    def run(self) -> Finding:
        store = self._store = self._opener.open(self._spec.name)
        try:
            return self._use(store)
        finally:
            store.abort()

    def failed(self, *why: str, change: str = "") -> Finding:
        name = self._spec.name
        keys = [key for key in ("address", "contact", "master", "endpoint", "path") if key in self._options]
        where = f"options.{name}.{keys[0]}, or what listens there" if keys else f"[options.{name}]"
        return problem(
            "stores",
            f"{name}: the store does not work",
            *why,
            "every load from it is a miss, and nothing is kept in it",
            change=change or f"{where}    (`kvplug list --options {name}` shows all options)",
        )

    def _use(self, store: Store) -> Finding:
        series = Series(opaque_format(_PAGE_BYTES), _NAMESPACE, store.seal.id)
        key = series.key_of(secrets.token_bytes(32))
        pages = PageBuffers.empty(series.format, 1)
        request = PageRequest(
            series=series, keys=(key,), identities=(_NAMESPACE,), memory=pages, is_use=False
        )
        miss = self._get(store, request)
        if miss not in (None, MissReason.ABSENT):
            return self.failed(f"a page was asked for, and the answer was {miss.value!r}")
        usage = store.usage()
        self.budget_bytes = usage.budget_bytes
        budget = "no limit of its own" if usage.budget_bytes is None else bytes_in_words(usage.budget_bytes)
        what = f"{self._spec.name}: it answers; {usage.num_pages} pages, budget {budget}"
        if not self._write:
            return ok("stores", what)
        content = secrets.token_bytes(_PAGE_BYTES)
        pages.rows().row(0)[:] = content
        (refused,) = store.submit_put(request, timeout=self._seconds).wait(self._seconds + 1)
        try:
            if refused is not None:
                return self._not_kept(refused, store)
            got = PageBuffers.empty(series.format, 1)
            miss = self._get(store, attrs.evolve(request, memory=got))
            if miss is not None:
                return self.failed(f"a page was put, and is {miss.value!r} when it is asked for")
            if bytes(got.rows().row(0)) != content:
                return self.failed("a page that was put has other bytes when it is got")
        finally:
            store.submit_remove((key,), timeout=self._seconds).wait(self._seconds + 1)
        return ok("stores", f"{what}; a page was put, got and removed")

    def _get(self, store: Store, request: PageRequest) -> MissReason | None:
        job = store.submit_get(request, timeout=self._seconds)
        (miss,) = job.wait(self._seconds + 1)
        if not job.wait_settled(1.0):
            raise TimeoutError("a page is still being copied")
        return miss

    def _not_kept(self, reason: PutReason, store: Store) -> Finding:
        name, usage = self._spec.name, store.usage()
        what = f"{name}: a page was not kept: {reason.value}"
        if reason not in (PutReason.NO_ROOM, PutReason.TOO_LARGE):
            return problem("stores", what, change=f"options.{name}: who may write there")
        if usage.budget_bytes is not None and usage.used_bytes + _PAGE_BYTES > usage.budget_bytes:
            why = "its budget is used by pages that may not be evicted"
            change = f"options.{name}.size = ...    (or delete what is not needed)"
        else:
            why = "what is behind it is full, such as a server or a disk"
            change = "a higher limit there: raise maxmemory of a Redis server"
            change += f"; or lower options.{name}.size" if "size" in self._options else ""
        return problem("stores", what, why, change=change)
