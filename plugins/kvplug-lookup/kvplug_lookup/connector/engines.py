"""Sources for the engines in a directory, as they join and leave."""

from __future__ import annotations

import logging
import threading

from kvplug.engine import ConnectorContext, Engine, Role
from kvplug.transport import Deadline
from kvplug_lookup.connector.sources import Source, followed

_log = logging.getLogger(__name__)


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
        self._followed: dict[str, Source] = {}
        """The engines to load from now, by the names of their sources."""
        self._used: dict[str, Source] = {}
        """Those that the scheduler uses."""
        self._planned: dict[str, Source] = {}
        """Those that the workers know from plans."""
        self._foreign: frozenset[str] = frozenset()
        """Engines with other models that were logged."""

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
            for name, source in list(self._followed.items()):
                # While the directory is silent, trust a connection over a missing announcement.
                if wanted.get(name) != source.engine or (is_stale and not source.is_connected):
                    _log.info("%s has left", name)
                    del self._followed[name]
                    source.end()
            for name, engine in wanted.items() if not is_stale else ():
                if name not in self._followed:
                    _log.info("%s has joined", name)
                    source = self._followed[name] = followed(self._context, name, engine.contacts)
                    source.engine = engine

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

    def update(self, sources: list[Source]) -> None:
        """Update the list for engines that joined or left since the last call."""
        with self._lock:
            followed = dict(self._followed)
        gone = {name for name, used in self._used.items() if followed.get(name) is not used}
        sources[:] = [source for source in sources if source.name not in gone]
        sources += [source for name, source in followed.items() if self._used.get(name) is not source]
        self._used = followed

    def take_changes(self) -> tuple[tuple[str, ...], tuple[tuple[str, tuple[str, ...]], ...]]:
        """Return changes for the workers: sources that left, and then sources that joined, with contacts."""
        used, planned = self._used, self._planned
        left = tuple(name for name, source in planned.items() if used.get(name) is not source)
        joined = tuple(
            (name, tuple(contact for _, contact in sorted(source.engine.contacts.items())))
            for name, source in used.items()
            if source.engine is not None and planned.get(name) is not source
        )
        self._planned = used
        return left, joined

    def close(self) -> None:
        """End all sources. Idempotent."""
        with self._lock:
            self._closed = True
            left, self._followed = list(self._followed.values()), {}
        if self._members is not None:
            self._members.close()
        for source in left:
            source.close()
