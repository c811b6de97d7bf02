"""Tries the config's stores and its directory. Plugin code runs in threads, which are abandoned if they do
not return."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TypeVar

import attrs

from kvplug.assembly.budgets import budgets_of, shortage_of
from kvplug.assembly.doctor.diagnosis import Examination
from kvplug.assembly.doctor.facts import token_bytes
from kvplug.assembly.doctor.finding import (
    Finding,
    faulty_keys,
    from_fault,
    judged,
    not_checked,
    note,
    ok,
    problem,
    text_of,
)
from kvplug.assembly.doctor.host import MIB
from kvplug.assembly.links import LinkSettings
from kvplug.assembly.resolve import ResolvedConfig
from kvplug.assembly.stores import StoreOpener
from kvplug.config.config import Role, directory_of
from kvplug.config.units import bytes_in_words
from kvplug.engine.page_cache import FlatPage, PageCache
from kvplug.errors import (
    AuthenticationError,
    ConfigError,
    KvplugError,
    PluginError,
    TimeoutError,
    TransportError,
)
from kvplug.net.threads import BackgroundThread
from kvplug.transport.spec import Kind, StoreSpec
from kvplug.transport.store.folder.files import check_private
from kvplug.transport.store.results import MissReason, PutReason, Usage
from kvplug.transport.store.store import Store

T = TypeVar("T")

THREAD: Final = "kvplug-doctor"
"""The name of the threads that run plugin code."""
LATE: Final = "--timeout 60"
"""What to change if the time ran out before everything was tried."""
_PAGE_BYTES: Final = 4096
_MOST_S: Final = 5.0
_LEAST_S: Final = 0.2
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


def of_directory(examination: Examination) -> Iterator[Finding]:
    """Check that the directory of engines in ``peers`` answers."""
    resolved, url = examination.resolved, examination.config.directory
    if url is None:
        return
    name = directory_of(url) or ""
    seconds = examination.deadline.within(_MOST_S).remaining() or _LEAST_S

    def entries() -> int:
        spec = resolved.registry.get(Kind.DIRECTORY, name)
        directory = resolved.make(spec, url=url, timeout_s=seconds)
        try:
            return len(directory.entries())
        finally:
            directory.close()

    try:
        count = _attempt(entries, seconds + 1.0)
    except (ConfigError, PluginError):
        yield not_checked("peers", f"the directory {name!r} was not asked", ("peers",))
    except Exception as e:
        yield problem(
            "peers",
            f"the directory {name!r} does not answer",
            text_of(e),
            "this engine finds no other engines, so it loads nothing from them",
            change="peers: the address of the directory; or start the server at this address",
        )
    else:
        yield ok("peers", f"the directory {name!r} answers; announced workers: {count}")


def of_stores(examination: Examination) -> Iterator[Finding]:
    """Open each store that an engine with this config opens, and request a page that does not exist."""
    config, resolved = examination.config, examination.resolved
    if not resolved.uses_stores or (config.role is Role.CONSUMER and not config.sources.get("stores")):
        return
    shortage = shortage_of(budgets_of(config, resolved.registry, frozenset({"connector", "stores"})))
    for name in config.stores:
        spec = resolved.registry.find(Kind.STORE, name)
        if spec is None or not spec.run_probe().viable:
            continue  # explain() reports this
        topics = [*examination.faulty_for_credentials(), *([] if shortage is None else [shortage.key])]
        options: Any = None
        try:
            options = resolved.options_of(spec)
        except ConfigError as e:
            topics += faulty_keys(e)
        except PluginError:
            topics.append(f"options.{name}")
        if topics:
            yield not_checked("stores", f"{name}: not tried", topics)
            continue
        path = os.path.expanduser(getattr(options, "path", None) or "")
        if path and not os.path.isfile(path):
            yield from _in_its_folder(examination, spec, Path(path).absolute())
        else:
            yield from _tried(examination, spec)


def _in_its_folder(examination: Examination, spec: StoreSpec, folder: Path) -> Iterator[Finding]:
    """Check that a store's folder (its option ``path``) is safe and has room, then try the store in a
    temporary folder there, so that the user's pages are not touched."""
    option = f"options.{spec.name}.path"
    at = next(each for each in (folder, *folder.parents) if each.exists())
    pages = [str(each) for each in folder.glob("*/pages")]  # where the stores "fs" and "nixl" keep them
    try:
        for own in (*map(os.path.dirname, pages), *pages):
            check_private(own, option)
        if at == folder:
            check_private(str(folder), option, is_given=True)
    except (ConfigError, OSError) as e:
        yield problem("stores", f"{spec.name}: the store cannot start", str(e), change=f"{option} = ...")
        return
    room = _of_room(spec.name, getattr(examination.resolved.options_of(spec), "size", None), at)
    try:
        with tempfile.TemporaryDirectory(prefix=".kvplug-doctor-", dir=at, ignore_cleanup_errors=True) as own:
            yield room
            if room.verdict != "problem":
                config = examination.config
                table = {**config.options.get(spec.name, {}), "path": f"{own}/pages"}
                moved = attrs.evolve(config, options={**config.options, spec.name: table})
                resolved = ResolvedConfig(moved, examination.resolved.registry)
                yield from _tried(attrs.evolve(examination, resolved=resolved), spec)
    except OSError as e:
        status, user = os.stat(at), os.geteuid()
        yield problem(
            "stores",
            f"{spec.name}: {at} cannot be written: {e.strerror}",
            f"user {user} runs this; user {status.st_uid} owns the folder, mode {status.st_mode & 0o777:o}",
            "no pages are kept there",
            change=f"chown {user} {at}    (or {option} = ..., another folder; or mount it read-write)",
        )


def _of_room(name: str, budget: object, at: Path) -> Finding:
    """Compare the free space at a folder with the store's budget."""
    room = os.statvfs(at)
    free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    return judged(
        "stores",
        f"{name}: {bytes_in_words(free)} of {bytes_in_words(total)} are free at {at}",
        "the disk is full, or smaller than the budget, so pages are not kept",
        change=f"options.{name}.path = ...    (another folder), or less in options.{name}.size",
        wrong=free < _FREE_NEEDED,
        doubtful=isinstance(budget, int) and budget > total,
    )


def _tried(examination: Examination, spec: StoreSpec) -> Iterator[Finding]:
    """Open a store and try it."""
    name, resolved = spec.name, examination.resolved
    seconds = examination.deadline.within(_MOST_S).remaining() or 0.0
    if seconds < _LEAST_S:
        what = f"{name}: it was not tried: the doctor ran out of time"
        yield note("stores", what, "earlier stores, or a busy host, used up the time", change=LATE)
        return
    opened: list[Store] = []

    def use() -> Usage:
        opened.append(StoreOpener(LinkSettings(resolved=resolved)).open(name))
        try:
            cache = PageCache(opened[0], engine=THREAD, timeout_s=seconds)
            _use(cache, name, seconds + 1.0, write=examination.write)
            return opened[0].usage()
        finally:
            opened[0].abort()

    def stop() -> None:
        for store in opened:
            store.abort()

    try:
        usage = _attempt(use, seconds + 1.0, stop)
    except Exception as e:
        why = e.faults if isinstance(e, ConfigError) else (text_of(e),)
        consequence = "every load from it is a miss, and it keeps no pages"
        change = _change_for(e, name, resolved.options_of(spec))
        yield problem("stores", f"{name}: the store does not work", *why, consequence, change=change)
        return
    budget, tried = usage.budget_bytes, "; a page was put, got and removed" if examination.write else ""
    limit = "none" if budget is None else bytes_in_words(budget)
    yield ok("stores", f"{name}: it answers; {usage.num_pages} pages, budget: {limit}{tried}")
    nbytes = token_bytes(examination.facts)
    if budget is not None and nbytes is not None:
        prompt = _PROMPT_TOKENS * nbytes
        yield judged(
            "stores",
            f"{name}: a prompt of {_PROMPT_TOKENS:,} tokens takes {bytes_in_words(prompt)} of {limit}",
            "longer prompts, or several at once, are not loaded whole",
            change=f'options.{name}.size = "{-(-_PROMPTS * prompt // MIB)} MiB"    (or more)',
            doubtful=budget < _PROMPTS * prompt,
        )


def _use(cache: PageCache, name: str, seconds: float, *, write: bool) -> None:
    """Request an absent page, and with ``write`` put, get and remove one.

    Raises:
        KvplugError: the store does not work.
    """
    key, put, got = (
        secrets.token_bytes(32),
        bytearray(secrets.token_bytes(_PAGE_BYTES)),
        bytearray(_PAGE_BYTES),
    )
    request = [FlatPage(key=key, view=memoryview(got))]
    (miss,) = cache.get(request).wait(seconds)
    if miss not in (None, MissReason.ABSENT):
        raise TransportError(f"a get of an absent page returned {miss.value!r}")
    if not write:
        return
    (refused,) = cache.put([FlatPage(key=key, view=memoryview(put))]).wait(seconds)
    try:
        if refused is not None:
            change = f"options.{name}, or the permission to write to the store"
            if refused in (PutReason.NO_ROOM, PutReason.TOO_LARGE):
                change = f"options.{name}.size, or the limit of the server behind it (maxmemory of Redis)"
            raise TransportError(f"a page was not kept: {refused.value}", change=change)
        (miss,) = cache.get(request).wait(seconds)
        if miss is not None:
            raise TransportError(f"a page was put, but a get of it returned {miss.value!r}")
        if got != put:
            raise TransportError("a get returned different bytes from those that were put")
    finally:
        cache.remove([key]).wait(seconds)


def _change_for(error: Exception, name: str, options: object) -> str:
    """Return what to change so that a store works."""
    if isinstance(error, ConfigError):
        return from_fault(error.faults[0]).change
    if isinstance(error, AuthenticationError):
        return "KVPLUG_SECRET or secret_file: the same at both ends"
    if isinstance(error, KvplugError) and error.change:
        return error.change
    place = next((f"options.{name}.{key}" for key in _PLACES if hasattr(options, key)), "")
    where = f"{place}, or the server at this address" if place else f"[options.{name}]"
    return f"{where}    (`kvplug list --options {name}` shows all options)"
