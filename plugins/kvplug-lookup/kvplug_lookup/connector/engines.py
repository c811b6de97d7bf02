"""The engines of a directory as sources, while they come and go."""

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
    """One engine has come or left."""

    name: str
    """Of its source."""
    source: FollowedSource | None
    """``None``: it has left."""
    contacts: Mapping[int, str] = attrs.field(factory=dict, repr=False)


class EngineSources:
    """A source for each engine in the directory from which this one can load.

    The directory's thread starts and ends their replicas, so that an engine that is idle connects to new ones
    at once, and dials none that has left. The scheduler takes the changes when it next has something to do.
    """

    def __init__(self, context: ConnectorContext) -> None:
        """Where the config names no directory, there are none."""
        self._context = context
        self._members = context.members
        self._lock = threading.Lock()
        self._model = context.members.model if context.members is not None else ""
        self._closed = False
        self._followed: dict[str, tuple[Engine, FollowedSource]] = {}
        self._changes: list[Change] = []
        self._strange: frozenset[str] = frozenset()
        """Engines of other models, which were logged."""
        self._left: list[str] = []
        self._joined: dict[str, tuple[str, ...]] = {}
        """What the workers have not been told."""

    def follow(self) -> None:
        """Begin."""
        if self._members is not None:
            self._members.follow(self._update)

    def wait_until_known(self, deadline: Deadline) -> None:
        """Raises what :meth:`Members.wait_until_known` raises."""
        if self._members is not None:
            self._members.wait_until_known(deadline)

    def _update(self, engines: tuple[Engine, ...], is_stale: bool) -> None:
        wanted = {f"peer {engine.engine_id}": engine for engine in engines if self._is_source(engine)}
        self._tell_strange(engines)
        with self._lock:
            if self._closed:
                return
            for name, (engine, source) in list(self._followed.items()):
                # While the directory is silent, a connection says more of an engine than its announcement.
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

    def _tell_strange(self, engines: tuple[Engine, ...]) -> None:
        strange = frozenset(engine.engine_id for engine in engines if engine.model != self._model)
        for engine_id in sorted(strange - self._strange):
            _log.info("engine %s in the directory has another model: nothing is loaded from it", engine_id)
        self._strange = strange

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
        """Change the list as engines have come and left since the last call."""
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

    def take_news(self) -> tuple[tuple[str, ...], tuple[tuple[str, tuple[str, ...]], ...]]:
        """What the workers must be told: sources that have left, and that have come after that with their
        contacts."""
        left, joined = tuple(self._left), tuple(self._joined.items())
        self._left, self._joined = [], {}
        return left, joined

    def close(self) -> None:
        """End all of them. Idempotent."""
        with self._lock:
            self._closed = True
            left, self._followed = list(self._followed.values()), {}
        if self._members is not None:
            self._members.close()
        for _, source in left:
            source.close()
