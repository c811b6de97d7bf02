"""Announces a worker in a directory, under a lease, and follows the engines that others announce there.

An announcement is JSON that names the worker and its address. In a deployment with a secret, an HMAC-SHA256
under a separate derived key precedes the JSON. An announcement without a valid HMAC counts as forged. The
directory itself is not trusted: an engine found in it proves its identity in the handshake, like an engine at
a configured address.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import random
import threading
import time
from collections.abc import Container, Mapping
from typing import Final

import attrs
import msgspec

from kvplug.assembly.resolve import EPOCH, ResolvedConfig
from kvplug.config.addresses import Address
from kvplug.config.config import directory_of
from kvplug.engine.connector.values import Parallelism
from kvplug.engine.context import Engine, Members, MembersListener
from kvplug.errors import ClosedError, ConfigError, TimeoutError
from kvplug.metrics.reasons import Op, Reason, reason_of
from kvplug.metrics.stats import TransferStats
from kvplug.negotiation.exchange import identity_of
from kvplug.negotiation.model import ModelInfo
from kvplug.net.deadline import Deadline
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.fork import close_after_fork
from kvplug.net.log import LogEvent
from kvplug.net.threads import BackgroundThread
from kvplug.net.trust.credentials import Credentials
from kvplug.transport.directory import Directory
from kvplug.transport.spec import Kind

_log = logging.getLogger(__name__)

_VERSION: Final = 1
_ROUNDS_PER_LEASE: Final = 5
_CALLS_PER_LEASE: Final = 5
"""A directory call times out after a lease divided by this, so that a lost call is repeated in time."""
_CLOSE_S: Final = 1.0
_MAX_ENTRY_BYTES: Final = 16 << 10
_MAX_WORKERS: Final = 1 << 16
_UNSIGNED: Final = b"-"


def fingerprint_of(model: ModelInfo) -> str:
    """Return a fingerprint of 16 hex digits, equal for models that the handshake finds equal.

    The model's name is not included.
    """
    facts = {key: value for key, value in attrs.asdict(model).items() if key != "name"}
    text = json.dumps(facts, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8, person=b"kvplug members").hexdigest()


@attrs.frozen
class _Version:
    """The part common to all versions of an announcement."""

    version: int


@attrs.frozen(kw_only=True)
class Announcement:
    """The announcement of one worker."""

    engine_id: str
    epoch: str
    rank: int
    num_workers: int
    contact: str = attrs.field(repr=False)
    role: str
    model: str
    version: int = _VERSION

    @property
    def name(self) -> str:
        """The name under which the directory keeps the announcement."""
        return f"{self.engine_id}/{self.rank}"

    def to_bytes(self, key: bytes | None) -> bytes:
        """Encode the announcement, with a proof made with ``key``, or without one if ``key`` is ``None``."""
        text = msgspec.json.encode(self)
        return _proof(key, text) + b" " + text

    @classmethod
    def from_bytes(cls, name: str, entry: bytes, key: bytes | None) -> Announcement | Reason:
        """Decode the announcement stored under ``name``, or return why it is rejected."""
        proof, _, text = entry[:_MAX_ENTRY_BYTES].partition(b" ")
        if key is not None and not hmac.compare_digest(proof, _proof(key, text)):
            return Reason.FORGED
        try:
            if msgspec.json.decode(text, type=_Version).version != _VERSION:
                return Reason.FORMAT
            found = msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return Reason.CORRUPT
        texts = (found.engine_id, found.epoch, found.contact, found.role, found.model)
        if found.name != name or not all(map(str.isprintable, texts)):
            return Reason.CORRUPT
        return found if 0 <= found.rank < found.num_workers <= _MAX_WORKERS else Reason.CORRUPT


def _proof(key: bytes | None, text: bytes) -> bytes:
    return _UNSIGNED if key is None else hmac.digest(key, text, "sha256").hex().encode()


def unreachable_contact(url: str, contact: str) -> str | None:
    """Return why other hosts that can reach the directory at ``url`` cannot dial ``contact``.

    Return ``None`` if they can dial it or cannot reach the directory, and for a Unix socket in the file
    system: containers of one host may share its folder.
    """
    address = Address.parse_contact(contact)
    is_local = Address(address.host).is_loopback if not address.is_unix else not address.is_path
    servers = url.partition("://")[2].partition("/")[0].rpartition("@")[2].split(",")
    hosts = [server.rpartition(":")[0].strip("[]") or server for server in servers]
    if not is_local or not any(host and not Address(host).is_loopback for host in hosts):
        return None
    return (
        f"host: {address} would be announced in a directory that other hosts can reach, but only processes on"
        " this host can reach that address; set host to an address of this host that other engines can reach,"
        " or use a directory at 127.0.0.1"
    )


class DirectoryMembers(Members):
    """Announces one worker and follows the other engines, in its own thread."""

    def __init__(
        self,
        directory: Directory,
        *,
        url: str,
        about: Announcement,
        credentials: Credentials,
        lease_s: float,
        stats: TransferStats,
    ) -> None:
        """``about``: the announcement without its contact."""
        self.model = about.model
        self._directory = directory
        self._url = url
        self._about = about
        secret = credentials.secret
        self._key = None if secret is None else hmac.digest(secret.reveal(), b"kvplug members", "sha256")
        self._lease_s = lease_s
        self._stats = stats
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._wanted = threading.Event()
        """Set to begin the next round at once."""
        self._announced: Announcement | None = None
        self._kept: Announcement | None = None
        """The announcement that the previous round left in the directory."""
        self._listener: MembersListener | None = None
        self._engines: tuple[Engine, ...] | None = None
        self._answered_at = time.monotonic()
        self._must_repeat = False
        """The listener's last call failed, or had a stale list."""
        self._failure = ""
        """The logged reason why the directory does not answer; empty while it answers."""
        self._rejected: dict[str, tuple[Reason, str]] = {}
        """The names of rejected entries, with the logged reasons."""
        self._closed = False
        self._thread: BackgroundThread | None = None
        close_after_fork(self)

    # -- called by a connector -----------------------------------------------------------------

    def announce(self, contact: str) -> None:
        if fault := unreachable_contact(self._url, contact):
            raise ConfigError(fault)
        self._announced = attrs.evolve(self._about, contact=contact)
        self._begin()

    def follow(self, listener: MembersListener) -> None:
        self._listener = listener
        self._begin()

    def _begin(self) -> None:
        with self._lock:
            if self._closed:
                raise ClosedError("the connector was shut down")
            if self._thread is None:
                thread = BackgroundThread(self._run, name="kvplug-members", stop=self._stop)
                with NamedExhaustion("following a directory of engines"):
                    thread.start()
                self._thread = thread
        self._wanted.set()

    def wait_until_known(self, deadline: Deadline) -> None:
        with self._lock:
            while self._engines is None:
                if self._closed:
                    raise ClosedError("the connector was shut down")
                if not self._changed.wait(deadline.remaining()) and deadline.expired:
                    why = self._failure or "it has not answered yet"
                    raise TimeoutError(f"the directory has not listed any engines: {why}")

    def close(self) -> None:
        self._stop()
        thread = self._thread
        if thread is None:
            self._directory.close()
        elif thread is not threading.current_thread():
            thread.join(_CLOSE_S)

    def _stop(self) -> None:
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        self._wanted.set()

    def _after_fork_in_child(self) -> None:
        self._closed, self._thread = True, None

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closed:
                began = time.monotonic()
                self._wanted.clear()
                self._round()
                # The jitter keeps engines from calling all at once.
                pause = self._lease_s / _ROUNDS_PER_LEASE * random.uniform(0.9, 1.1)
                self._wanted.wait(max(0.0, pause - (time.monotonic() - began)))
        finally:
            self._leave()

    def _round(self) -> None:
        began = time.perf_counter()
        announced, listener = self._announced, self._listener
        try:
            entries = self._directory.entries()
            if announced is not None:
                entry = announced.to_bytes(self._key)
                self._directory.announce(announced.name, entry, self._lease_s)
        except Exception as e:
            self._stats.fail(Op.MEMBERS, reason_of(e))
            reason = f"{type(e).__name__}: {e}"
            if reason != self._failure and not self._closed:
                self._failure = reason
                text = f"the directory of engines does not answer ({reason}); its last answer stays in use"
                LogEvent.DIRECTORY_FAILED.log(_log, text, error=reason)
            if listener is not None and time.monotonic() - self._answered_at > self._lease_s:
                self._notify(listener, is_stale=True)
            return
        self._stats.record(Op.MEMBERS, seconds=time.perf_counter() - began)
        if self._failure:
            self._failure = ""
            LogEvent.DIRECTORY_ANSWERS.log(_log, "the directory of engines answers again")
        self._answered_at = time.monotonic()
        engines = self._engines_of(entries)
        self._kept = announced
        with self._lock:
            is_new = engines != self._engines
            self._engines = engines
            self._changed.notify_all()
        if listener is not None and (is_new or self._must_repeat):
            self._notify(listener, is_stale=False)

    def _notify(self, listener: MembersListener, *, is_stale: bool) -> None:
        self._must_repeat = is_stale
        try:
            listener(self._engines or (), is_stale)
        except Exception:
            self._must_repeat = True
            _log.exception("the connector failed to process a change in the directory of engines")

    def _engines_of(self, entries: Mapping[str, bytes]) -> tuple[Engine, ...]:
        """Return the other engines that have announced all their workers, sorted by id."""
        known: dict[str, Announcement] = {}
        rejected: dict[str, tuple[Reason, str]] = {}
        for name, entry in entries.items():
            found = Announcement.from_bytes(name, entry, self._key)
            if isinstance(found, Reason):
                rejected[name] = found, _WHY[found]
            else:
                known[name] = found
        ours = {each.contact for each in known.values() if each.engine_id == self._about.engine_id}
        workers: dict[str, list[Announcement]] = {}
        for name, each in known.items():
            if each.engine_id != self._about.engine_id:
                workers.setdefault(each.engine_id, []).append(each)
                if each.contact in ours:
                    why = f"its address is this engine's own; set host at {each.engine_id!r} to an address"
                    rejected[name] = Reason.REFUSED, f"{why} of its own that all other engines can reach"
        if self._listener is None:  # only a follower judges others' announcements
            rejected = {}
        if self._kept is not None and known.get(self._kept.name, self._kept) != self._kept:
            rejected[self._kept.name] = Reason.REFUSED, _WHY[Reason.REFUSED]
        for name, (reason, why) in rejected.items():
            self._stats.fail(Op.MEMBERS, reason)
            if self._rejected.get(name) != (reason, why):
                _log.warning("the announcement %r is ignored: %s", name, why)
        self._rejected = rejected
        every = (_engine_of(of, ours) for _, of in sorted(workers.items()))
        return tuple(engine for engine in every if engine is not None)

    def _leave(self) -> None:
        try:
            if self._announced is not None:
                self._directory.withdraw(self._announced.name)
            self._directory.close()
        except Exception as e:  # the lease expires anyway
            _log.debug("this engine's announcement was not withdrawn: %s", e)


def _engine_of(workers: list[Announcement], ours: Container[str]) -> Engine | None:
    """Return the engine that these workers form. Return ``None`` if a worker is missing, if they disagree, or
    if one has a contact of this engine (``ours``)."""
    workers = sorted(workers, key=lambda each: each.rank)
    first = workers[0]
    alike = {(each.num_workers, each.role, each.model) for each in workers}
    if len(workers) != first.num_workers or len(alike) > 1 or any(each.contact in ours for each in workers):
        return None
    return Engine(
        engine_id=first.engine_id,
        epochs=tuple(each.epoch for each in workers),
        contacts={each.rank: f"{each.contact}#{identity_of(each.engine_id, each.epoch)}" for each in workers},
        role=first.role,
        model=first.model,
    )


_WHY: Final = {
    Reason.FORGED: "it has no proof made with this deployment's secret",
    Reason.FORMAT: "it comes from another version of kvplug",
    Reason.CORRUPT: "it is not a valid announcement",
    Reason.REFUSED: "another process uses this engine's engine_id; each engine needs its own",
}


def members_of(
    resolved: ResolvedConfig,
    *,
    parallelism: Parallelism,
    model: ModelInfo,
    stats: TransferStats,
) -> Members | None:
    """Open the directory in the config's ``peers`` for this process. Return ``None`` if there is none.

    Raises:
        UnknownNameError, AmbiguousNameError: no plugin offers that directory, or two do.
        ConfigError: the directory's options are wrong.
        PluginError: the directory cannot work here.
    """
    config = resolved.config
    url = config.directory
    if url is None:
        return None
    spec = resolved.usable(Kind.DIRECTORY, directory_of(url) or "")
    about = Announcement(
        engine_id=config.engine_id,
        epoch=EPOCH,
        rank=parallelism.worker_rank,
        num_workers=parallelism.num_workers,
        contact="",
        role=str(config.require_role()),
        model=fingerprint_of(model),
    )
    return DirectoryMembers(
        resolved.make(spec, url=url, timeout_s=config.peers_lease_s / _CALLS_PER_LEASE),
        url=url,
        about=about,
        credentials=resolved.credentials,
        lease_s=config.peers_lease_s,
        stats=stats,
    )
