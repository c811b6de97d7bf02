"""Tries the config's stores and its directory, whose plugin code runs in threads that may be abandoned."""

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

from kvplug.assembly.examination.checks import MIB
from kvplug.assembly.examination.finding import Finding, from_fault, note, ok, problem, text_of
from kvplug.assembly.links import LinkSettings
from kvplug.assembly.resolve import ResolvedConfig
from kvplug.assembly.stores import StoreOpener
from kvplug.config.config import Role, directory_of
from kvplug.config.options import option_fields
from kvplug.config.units import bytes_in_words
from kvplug.errors import AuthenticationError, ConfigError, KvplugError, TimeoutError
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
"""The name of threads that run plugin code."""
LATE: Final = "--timeout 60"
"""The remedy if the time ran out before everything was tried."""
_PAGE_BYTES: Final = 4096
_NAMESPACE: Final = b"kvplug doctor"
_MOST_S: Final = 5.0
_LEAST_S: Final = 0.2
_MAX_LOGGED: Final = 8
_FREE_NEEDED: Final = 64 * MIB
_PROMPT_TOKENS: Final = 8192
_PROMPTS: Final = 2
"""The number of prompts that a store should hold."""
_PLACES: Final = ("address", "contact", "master", "endpoint", "path")
"""Options that give a store's location."""


def _attempt(call: Callable[[], T], seconds: float, stop: Callable[[], object] = lambda: None) -> T:
    """Return the result of a call that may hang. After ``seconds``, ``stop`` is called to end it.

    Raises:
        TimeoutError: the call did not return in time.
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
    """Check that the directory of engines in ``peers`` answers."""
    url = resolved.config.directory
    if url is None:
        return
    name = directory_of(url) or ""
    seconds = deadline.within(_MOST_S).remaining() or _LEAST_S

    def entries() -> int:
        spec = resolved.registry.get(Kind.DIRECTORY, name)
        directory = resolved.make(spec, url=url, timeout_s=seconds)
        try:
            return len(directory.entries())
        finally:
            directory.close()

    try:
        count = _attempt(entries, seconds + 1.0)
    except Exception as e:
        yield problem(
            "peers",
            f"the directory {name!r} does not answer",
            text_of(e),
            "this engine finds no other engines, so it loads nothing from them",
            change="peers: the address of the directory; or start what listens there",
        )
    else:
        yield ok("peers", f"the directory {name!r} answers; announced workers: {count}")


def of_stores(
    resolved: ResolvedConfig, deadline: Deadline, *, write: bool, token_bytes: int | None = None
) -> Iterator[Finding]:
    """Open each store that an engine with this config opens, and request a page that does not exist.

    Args:
        write: also put a test page, get it and remove it.
        token_bytes: the bytes of one token's KV, to compare the budget with a prompt.
    """
    config = resolved.config
    if not resolved.uses_stores or (config.role is Role.CONSUMER and not config.sources.get("stores")):
        return
    for name in config.stores:
        spec = resolved.registry.find(Kind.STORE, name)
        if spec is None or not spec.run_probe().viable:
            continue  # a finding of the config
        trial = _Trial(resolved=resolved, spec=spec, deadline=deadline, write=write)
        path = getattr(trial.options, "path", None)
        if not isinstance(path, str) or not path or os.path.isfile(os.path.expanduser(path)):
            yield from trial.run()
        else:
            yield from _in_its_folder(trial, Path(os.path.expanduser(path)).absolute())
        if trial.budget_bytes is not None and token_bytes is not None:
            yield _beside_a_prompt(spec.name, trial.budget_bytes, _PROMPT_TOKENS * token_bytes)


def _beside_a_prompt(name: str, budget: int, prompt: int) -> Finding:
    what = f"{name}: a prompt of {_PROMPT_TOKENS:,} tokens takes {bytes_in_words(prompt)} of"
    what += f" {bytes_in_words(budget)}"
    if budget >= _PROMPTS * prompt:
        return ok("stores", what)
    change = f'options.{name}.size = "{-(-_PROMPTS * prompt // MIB)} MiB"    (or more)'
    return note("stores", what, "longer prompts, or several at once, are not loaded whole", change=change)


# -- a folder ------------------------------------------------------------------------------------------


def _in_its_folder(trial: _Trial, folder: Path) -> Iterator[Finding]:
    """Check that a store's folder (its option ``path``) is safe and has room, then try the store in a
    temporary folder there, so that the user's pages are not touched."""
    name = trial.spec.name
    option = f"options.{name}.path"
    at = next(each for each in (folder, *folder.parents) if each.exists())
    pages = [str(each) for each in folder.glob("*/pages")]  # as the stores "fs" and "nixl" have them
    try:
        for own in (*map(os.path.dirname, pages), *pages):
            check_private(own, option)
        if at == folder:
            check_private(str(folder), option, is_given=True)
    except (ConfigError, OSError) as e:
        yield problem("stores", f"{name}: the store cannot start", str(e), change=f"{option} = ...")
        return
    room = _of_room(trial, os.statvfs(at), at)
    try:
        with tempfile.TemporaryDirectory(prefix=".kvplug-doctor-", dir=at, ignore_cleanup_errors=True) as own:
            yield room
            if room.verdict != "problem":
                trial.move_to(f"{own}/pages")
                yield from trial.run()
    except OSError as e:
        status, user = os.stat(at), os.geteuid()
        yield problem(
            "stores",
            f"{name}: {at} cannot be written: {e.strerror}",
            f"user {user} runs this; user {status.st_uid} owns the folder, mode {status.st_mode & 0o777:o}",
            "pages are not kept there",
            change=f"chown {user} {at}    (or {option} = ..., another folder; or mount it for writing)",
        )


def _of_room(trial: _Trial, room: os.statvfs_result, at: Path) -> Finding:
    """Compare the free space at a folder with the store's budget."""
    name, budget = trial.spec.name, getattr(trial.options, "size", None)
    free = room.f_bavail * room.f_frsize
    what = f"{name}: {bytes_in_words(free)} are free at {at}"
    if free < _FREE_NEEDED:
        change = f"options.{name}.path = ...    (another folder), or delete files"
        return problem("stores", what, "the disk is full: pages are not kept", change=change)
    if isinstance(budget, int) and budget > room.f_blocks * room.f_frsize:
        why = f"the budget of {bytes_in_words(budget)} is more than the disk has"
        change = f'options.{name}.size = "{free // 2 // MIB} MiB"'
        return note("stores", what, why, change=change)
    return ok("stores", what)


# -- a store -------------------------------------------------------------------------------------------


class _Warnings(logging.Handler):
    """Collects the warnings logged while a store is tried, which may explain why it does not work."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.lines) < _MAX_LOGGED:
            self.lines.append(peer_text(record.getMessage()))


@attrs.define(kw_only=True)
class _Trial:
    """The trial of one store, which is opened and used."""

    resolved: ResolvedConfig
    spec: StoreSpec
    deadline: Deadline
    write: bool
    options: Any = attrs.field(init=False)
    budget_bytes: int | None = None
    """Known when the store has answered."""
    _store: Store | None = None
    _seconds: float = 0.0

    def __attrs_post_init__(self) -> None:
        self.options = self.resolved.options_of(self.spec)

    def move_to(self, path: str) -> None:
        """Replace the store's option ``path``."""
        config, name = self.resolved.config, self.spec.name
        tables = {**config.options, name: {**config.options.get(name, {}), "path": path}}
        self.resolved = ResolvedConfig(attrs.evolve(config, options=tables), self.resolved.registry)

    def run(self) -> Iterator[Finding]:
        self._seconds = self.deadline.within(_MOST_S).remaining() or 0.0
        if self._seconds < _LEAST_S:
            what = f"{self.spec.name}: it was not tried: the doctor ran out of time"
            yield note("stores", what, "earlier stores, or a busy host, used up the time", change=LATE)
            return
        warnings = _Warnings()
        logging.getLogger().addHandler(warnings)
        try:
            found = _attempt(self._open_and_use, self._seconds + 1.0, self._stop)
        except ConfigError as e:
            found = self._failed(*e.faults, change=from_fault(e.faults[0]).change)
        except AuthenticationError as e:
            found = self._failed(str(e), change="KVPLUG_SECRET or secret_file: the same at both ends")
        except Exception as e:
            found = self._failed(text_of(e), change=e.change if isinstance(e, KvplugError) else "")
        finally:
            logging.getLogger().removeHandler(warnings)
        if found.verdict != "ok":
            found = attrs.evolve(found, why=tuple(dict.fromkeys((*found.why, *warnings.lines))))
        yield found

    def _stop(self) -> None:
        if self._store is not None:
            self._store.abort()

    def _open_and_use(self) -> Finding:
        store = self._store = StoreOpener(LinkSettings(resolved=self.resolved)).open(self.spec.name)
        try:
            return self._use(store)
        finally:
            store.abort()

    def _failed(self, *why: str, change: str = "") -> Finding:
        name = self.spec.name
        known = () if self.options is None else option_fields(type(self.options))
        place = next((f"options.{name}.{key}, or what listens there" for key in _PLACES if key in known), "")
        change = (
            change or f"{place or f'[options.{name}]'}    (`kvplug list --options {name}` shows all options)"
        )
        consequence = "every load from it is a miss, and nothing is kept in it"
        return problem("stores", f"{name}: the store does not work", *why, consequence, change=change)

    def _use(self, store: Store) -> Finding:
        series = Series(opaque_format(_PAGE_BYTES), _NAMESPACE, store.seal.id)
        key = series.key_of(secrets.token_bytes(32))
        pages, got = (PageBuffers.empty(series.format, 1) for _ in range(2))
        request = PageRequest(
            series=series, keys=(key,), identities=(_NAMESPACE,), memory=pages, is_use=False
        )
        miss = self._get(store, request)
        if miss not in (None, MissReason.ABSENT):
            return self._failed(f"a page was requested, and the answer was {miss.value!r}")
        usage = store.usage()
        budget = "no limit of its own" if usage.budget_bytes is None else bytes_in_words(usage.budget_bytes)
        what = f"{self.spec.name}: it answers; {usage.num_pages} pages, budget {budget}"
        if self.write:
            content = pages.rows().row(0)[:] = secrets.token_bytes(_PAGE_BYTES)
            (refused,) = store.submit_put(request, timeout=self._seconds).wait(self._seconds + 1)
            try:
                if refused is not None:
                    return self._not_kept(refused, store)
                miss = self._get(store, attrs.evolve(request, memory=got))
                if miss is not None:
                    return self._failed(f"a page was put, but getting it answers {miss.value!r}")
                if bytes(got.rows().row(0)) != content:
                    return self._failed("a page that was put came back with other bytes")
            finally:
                store.submit_remove((key,), timeout=self._seconds).wait(self._seconds + 1)
            what += "; a page was put, got and removed"
        self.budget_bytes = usage.budget_bytes
        return ok("stores", what)

    def _get(self, store: Store, request: PageRequest) -> MissReason | None:
        job = store.submit_get(request, timeout=self._seconds)
        (miss,) = job.wait(self._seconds + 1)
        if not job.wait_settled(1.0):
            raise TimeoutError("a page is still being copied")
        return miss

    def _not_kept(self, reason: PutReason, store: Store) -> Finding:
        name, usage = self.spec.name, store.usage()
        what = f"{name}: a page was not kept: {reason.value}"
        if reason not in (PutReason.NO_ROOM, PutReason.TOO_LARGE):
            return problem("stores", what, change=f"options.{name}: who may write there")
        if usage.budget_bytes is not None and usage.used_bytes + _PAGE_BYTES > usage.budget_bytes:
            why = "its budget is used by pages that may not be evicted"
            return problem("stores", what, why, change=f"options.{name}.size = ...    (or delete some)")
        change = "a higher limit there: raise maxmemory of a Redis server"
        if hasattr(self.options, "size"):
            change += f"; or lower options.{name}.size"
        return problem("stores", what, "the server or disk behind it is full", change=change)
