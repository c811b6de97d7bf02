"""Sources for the engines in a directory, as they join and leave."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

import attrs

from kvplug.engine import ConnectorContext, Engine, Role
from kvplug.transport import Deadline
from kvplug_lookup.connector.sources import FollowedSource, Source, followed

_log = logging.getLogger(__name__)


@attrs.frozen
class Change:
    """One engine has joined or left."""

    name: str
    """Name of its source."""
    source: FollowedSource | None
    """``None``: the engine has left."""
    contacts: Mapping[int, str] = attrs.field(factory=dict, repr=False)


class EngineSources:
    """A source for each engine in the directory that this engine can load from.

    The directory's thread starts and ends their replicas, so that an idle engine connects to new engines at
    once, and stops connecting to those that have left. The scheduler takes the changes in its next call.
    """

    def __init__(self, context: ConnectorContext) -> None:
        """There are no sources if the config names no directory."""
        self._context = context
        self._members = context.members
        self._lock = threading.Lock()
        self._model = context.members.model if context.members is not None else ""
        self._closed = False
        self._followed: dict[str, tuple[Engine, FollowedSource]] = {}
        self._changes: list[Change] = []
        self._foreign: frozenset[str] = frozenset()
        """Engines with other models that were logged."""
        self._left: list[str] = []
        self._joined: dict[str, tuple[str, ...]] = {}
        """Changes for the next plan."""

    def follow(self) -> None:
        """Start following the directory."""
        if self._members is not None:
            self._members.follow(self._update)

    def wait_until_known(self, deadline: Deadline) -> None:
        """Raises what :meth:`Members.wait_until_known` raises."""
        if self._members is not None:
            self._members.wait_until_known(deadline)

    def _update(self, engines: tuple[Engine, ...], is_stale: bool) -> None:
        wanted = {f"peer {engine.engine_id}": engine for engine in engines if self._is_source(engine)}
        self._log_foreign(engines)
        with self._lock:
            if self._closed:
                return
            for name, (engine, source) in list(self._followed.items()):
                # While the directory is silent, trust a connection over a missing announcement.
                if wanted.get(name) != engine or (is_stale and not source.is_connected):
                    self._leave(name, source)
            for name, engine in wanted.items() if not is_stale else ():
                if name not in self._followed:
                    self._join(name, engine)

    def _is_source(self, engine: Engine) -> bool:
        return (
            engine.role != Role.CONSUMER
            and engine.model == self._model
            and len(engine.contacts) == self._context.parallelism.num_workers
        )

    def _log_foreign(self, engines: tuple[Engine, ...]) -> None:
        foreign = frozenset(engine.engine_id for engine in engines if engine.model != self._model)
        for engine_id in sorted(foreign - self._foreign):
            _log.info("not loading from engine %s in the directory: it has another model", engine_id)
        self._foreign = foreign

    def _join(self, name: str, engine: Engine) -> None:
        _log.info("%s has joined", name)
        source = followed(self._context, name, engine.contacts)
        self._followed[name] = engine, source
        self._changes.append(Change(name, source, engine.contacts))

    def _leave(self, name: str, source: FollowedSource) -> None:
        _log.info("%s has left", name)
        del self._followed[name]
        source.end()
        self._changes.append(Change(name, None))

    def update(self, sources: list[Source]) -> None:
        """Update the list for engines that joined or left since the last call."""
        if not self._changes:
            return
        with self._lock:
            changes, self._changes = self._changes, []
        for change in changes:
            sources[:] = [source for source in sources if source.name != change.name]
            self._joined.pop(change.name, None)
            if change.source is None:
                self._left.append(change.name)
            else:
                sources.append(change.source)
                self._joined[change.name] = tuple(change.contacts[rank] for rank in sorted(change.contacts))

    def take_changes(self) -> tuple[tuple[str, ...], tuple[tuple[str, tuple[str, ...]], ...]]:
        """Return changes for the workers: sources that left, and then sources that joined, with contacts."""
        left, joined = tuple(self._left), tuple(self._joined.items())
        self._left, self._joined = [], {}
        return left, joined

    def close(self) -> None:
        """End all sources. Idempotent."""
        with self._lock:
            self._closed = True
            left, self._followed = list(self._followed.values()), {}
        if self._members is not None:
            self._members.close()
        for _, source in left:
            source.close()
