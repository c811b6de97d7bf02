"""The engines of a directory that a connector uses, as they join and leave."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from kvplug.config.config import Role
from kvplug.engine.context import ConnectorContext, Engine
from kvplug.net.deadline import Deadline

_log = logging.getLogger(__name__)


class JoinedEngine(Protocol):
    """What a connector keeps for an engine from when it joins until it leaves."""

    @property
    def is_up(self) -> bool:
        """Whether the engine's workers are connected now."""

    def end(self) -> object:
        """End it without waiting. Called once the engine has left."""

    def close(self) -> object:
        """End it, and wait briefly for its threads."""


J = TypeVar("J", bound=JoinedEngine)


class JoinedEngines(Generic[J]):
    """Keeps an object for each engine in the directory that KV can be loaded from.

    These are producers with the same model. The directory's thread makes and ends the objects, so that an
    idle engine also connects to new engines at once, and stops connecting to those that have left. While the
    directory does not answer, no engine joins, and engines that are not up leave.
    """

    def __init__(
        self,
        context: ConnectorContext,
        join: Callable[[Engine], J],
        is_wanted: Callable[[Engine], bool] = lambda engine: True,
    ) -> None:
        """There are no engines if the config names no directory.

        Args:
            join: makes the object of an engine that has joined. If it raises, it is called again later.
            is_wanted: whether an engine can be used.
        """
        self._members = context.members
        self._join = join
        self._is_wanted = is_wanted
        self._lock = threading.Lock()
        self._closed = False
        self._joined: dict[str, tuple[Engine, J]] = {}
        self._foreign: frozenset[str] = frozenset()
        """Engines with other models that were logged."""

    def follow(self) -> None:
        """Start to follow the directory."""
        if self._members is not None:
            self._members.follow(self._update)

    def wait_until_known(self, deadline: Deadline) -> None:
        """Raises what :meth:`Members.wait_until_known` raises."""
        if self._members is not None:
            self._members.wait_until_known(deadline)

    def _update(self, engines: tuple[Engine, ...], is_stale: bool) -> None:
        assert self._members is not None
        foreign = frozenset(each.engine_id for each in engines if each.model != self._members.model)
        for engine_id in sorted(foreign - self._foreign):
            _log.info("not loading from engine %s in the directory: it has another model", engine_id)
        self._foreign = foreign
        wanted = {
            each.engine_id: each
            for each in engines
            if each.engine_id not in foreign and each.role != Role.CONSUMER and self._is_wanted(each)
        }
        with self._lock:
            if self._closed:
                return
            for engine_id, (engine, joined) in list(self._joined.items()):
                # While the directory is silent, trust a connection over a missing announcement.
                if wanted.get(engine_id) != engine or (is_stale and not joined.is_up):
                    _log.info("engine %s has left", engine_id)
                    del self._joined[engine_id]
                    joined.end()
            for engine_id, engine in wanted.items() if not is_stale else ():
                if engine_id not in self._joined:
                    _log.info("engine %s has joined", engine_id)
                    self._joined[engine_id] = engine, self._join(engine)

    def all(self) -> list[J]:
        """Return the objects of the engines that can be loaded from now."""
        with self._lock:
            return [joined for _, joined in self._joined.values()]

    def close(self) -> None:
        """Stop following the directory, and close all objects. Idempotent."""
        with self._lock:
            self._closed = True
            left, self._joined = [joined for _, joined in self._joined.values()], {}
        if self._members is not None:
            self._members.close()
        for each in left:
            each.end()
        for each in left:
            each.close()
