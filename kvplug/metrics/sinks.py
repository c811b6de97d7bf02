"""Metrics sinks. Each is called periodically with the changes since its last call, never per transfer."""

from __future__ import annotations

import abc
import logging
import threading
from collections.abc import Mapping, Sequence

from kvplug.metrics.stats import StatsReader, StatsSnapshot, TransferStats
from kvplug.net.threads import BackgroundThread

_log = logging.getLogger(__name__)

_CLOSE_S = 5.0
"""How long a sink may delay the closing of a connector."""


class Sink(abc.ABC):
    """Shows, stores or sends metrics.

    kvplug calls it from one thread at a time, and holds no lock meanwhile. Exceptions are logged once until
    the sink works again, and otherwise ignored: metrics never make a transfer fail.
    """

    @abc.abstractmethod
    def emit(self, snapshot: StatsSnapshot, labels: Mapping[str, str]) -> None:
        """Process ``snapshot``: the counts since the last call (see :mod:`kvplug.metrics.stats`), never
        empty.

        ``labels`` name the source of the metrics: ``connector`` (empty for a plain pipe and a served store),
        ``side`` (``"scheduler"``, ``"worker"``, ``"pipe"`` or ``"store"``), ``role``, ``rank`` and
        ``engine_id``.
        """

    def close(self) -> None:  # noqa: B027 - a sink may have nothing to close
        """Close sockets and files, after the last :meth:`emit`. kvplug calls this once for each sink that a
        config names. A program closes the sinks that it made. Does nothing by default.
        """


class LogSink(Sink):
    """Logs one line for each counted operation, each route of opened pipes, each transport with slow paths,
    each slow store, and each source that did not hold requested pages."""

    def __init__(self, options: object = None) -> None:
        """Create the sink of ``sinks = ["log"]`` in a config. It takes no options."""

    def emit(self, snapshot: StatsSnapshot, labels: Mapping[str, str]) -> None:
        who = " ".join(f"{name}={value}" for name, value in labels.items())
        ops, failures = snapshot["ops"], snapshot["failures"]
        for op in (*ops, *(op for op in failures if op not in ops)):
            figures = ops.get(op, {"count": 0, "bytes": 0, "tokens": 0, "seconds": 0.0})
            failed = ", ".join(f"{reason} {count}" for reason, count in failures.get(op, {}).items())
            _log.info(
                "%s %s: %d done, %.1f MB, %d tokens, %.4f s; failed: %s",
                who,
                op,
                figures["count"],
                figures["bytes"] / 1e6,
                figures["tokens"],
                figures["seconds"],
                failed or "none",
            )
        for route, count in snapshot.get("routes", {}).items():
            _log.info("%s pipes: %d opened over %s", who, count, route)
        for op, names in snapshot.get("slow", {}).items():
            for name, count in names.items():
                _log.info("%s slow %s: %d by %s", who, op, count, name)
        for source, count in snapshot.get("not_held", {}).items():
            _log.info("%s not held: %d pages by %s", who, count, source)


class Reporter:
    """Calls every sink with the new counts every ``interval_s`` seconds, and once more at the end.

    Its thread exists only while the reporter is open and has sinks. Without sinks it costs nothing.
    """

    def __init__(
        self,
        stats: TransferStats,
        sinks: Sequence[Sink],
        labels: Mapping[str, str] | None = None,
        *,
        owned: Sequence[Sink] = (),
        interval_s: float = 10.0,
    ) -> None:
        """``owned`` sinks are called like ``sinks``, and closed at the end."""
        self._sinks = (*owned, *sinks)
        self._owned = tuple(owned)
        self._labels = dict(labels or {})
        self._interval_s = interval_s
        self._reader = StatsReader(stats)
        self._broken: set[int] = set()
        self._emitting = threading.Lock()
        self._closed = threading.Event()
        self._thread: BackgroundThread | None = None
        if self._sinks:
            self._thread = BackgroundThread(self._run, name="kvplug-metrics", stop=self._closed.set)
            self._thread.start()

    def emit(self) -> None:
        """Call every sink with the new counts now."""
        with self._emitting:
            snapshot = self._reader.take() if self._sinks else None
            if snapshot is None:
                return
            for sink in self._sinks:
                try:
                    sink.emit(snapshot, self._labels)
                    self._broken.discard(id(sink))
                except Exception:
                    if id(sink) not in self._broken:
                        _log.warning(
                            "metrics sink %r failed; further failures are not logged until it works again",
                            sink,
                            exc_info=True,
                        )
                    self._broken.add(id(sink))

    def end(self) -> None:
        """Start in the thread what :meth:`close` does, and return at once."""
        self._closed.set()

    def close(self) -> None:
        """Emit the last figures, close the owned sinks, and end the thread. Idempotent. Waits for the sinks
        for at most five seconds.
        """
        self._closed.set()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(timeout=_CLOSE_S)
        if thread.is_alive():
            self._thread = None  # a second close does not wait again
            _log.warning("a metrics sink of %s hangs; the last figures are not reported", self._labels)

    def _run(self) -> None:
        while not self._closed.wait(self._interval_s):
            self.emit()
        self.emit()
        for sink in self._owned:
            try:
                sink.close()
            except Exception:
                _log.warning("closing the metrics sink %r failed", sink, exc_info=True)
