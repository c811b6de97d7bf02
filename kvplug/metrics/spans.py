"""What each request waited for: one record, a *span*, for each part of its way.

The data path only reads the clock, and records a span once that part has ended: a few for each request, none
for a page or a token. The newest spans stay in memory, for ``kvplug explain --request``; with ``tracing`` in
the config, a thread exports them (:mod:`kvplug.metrics.tracing`). Trace ids follow W3C Trace Context
(https://www.w3.org/TR/trace-context/), so that an engine and its peers record into one trace.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

import attrs

_MAX_SPANS: Final = 4096
"""How many spans one side of a connector keeps, about 300 requests."""
_MAX_ID: Final = 256
"""Characters of a request's id that are kept: clients of an engine may choose it."""
_CLOCK_STEP_NS: Final = 1_000_000
_MAX_GROUPS: Final = 4
"""Groups of layers of one load, each with a span of its own."""
_TRACEPARENT: Final = re.compile(
    r"(?!ff|00.{54})[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?"
)

TRACEPARENT: Final = "traceparent"
"""The key of a trace context in ``kv_transfer_params`` and in messages."""

Attribute = str | int | float | bool


@attrs.frozen
class SpanContext:
    """The place of a span in a trace."""

    trace_id: str
    """32 lowercase hexadecimal digits."""
    span_id: str
    """16 lowercase hexadecimal digits."""
    is_sampled: bool = True
    """Whether the trace is exported. Whoever begins a trace decides it."""

    @classmethod
    def new(cls, parent: SpanContext | None = None) -> SpanContext:
        """Make the context of a new span: in the parent's trace, or in a new one."""
        span_id = os.urandom(8).hex()
        if parent is None:
            return cls(os.urandom(16).hex(), span_id)
        return cls(parent.trace_id, span_id, parent.is_sampled)

    @classmethod
    def parse(cls, traceparent: object) -> SpanContext | None:
        """Decode the value of a ``traceparent`` header; ``None`` if it is not valid."""
        found = _TRACEPARENT.fullmatch(traceparent) if isinstance(traceparent, str) else None
        return None if found is None else cls(found[1], found[2], bool(int(found[3], 16) & 1))

    def __str__(self) -> str:
        """Return the value of a ``traceparent`` header."""
        return f"00-{self.trace_id}-{self.span_id}-{self.is_sampled:02x}"


@attrs.frozen(kw_only=True)
class Span:
    """One part of a request's way, which has ended."""

    name: str
    """What was done, such as ``load``. It is exported as ``kvplug.load``; so are the names of attributes."""
    context: SpanContext
    parent_id: str = ""
    """``span_id`` of the span that this one is a part of; empty for the first one of a trace."""
    request_id: str
    """The engine's id of the request, or its beginning if it is very long; the same request may have another
    id in a peer engine."""
    start_ns: int
    """Nanoseconds since 1970, by this host's clock."""
    duration_ns: int
    attributes: Mapping[str, Attribute] = attrs.field(factory=dict)
    reason: str = ""
    """Why it failed: a :class:`~kvplug.metrics.reasons.Reason`. Empty: it succeeded."""


class SpanLog:
    """The newest spans of one side of a connector. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: deque[Span] = deque(maxlen=_MAX_SPANS)
        self._count = 0
        """How many spans were ever recorded."""
        self._offset_ns = time.time_ns() - time.perf_counter_ns()
        self._contexts: dict[str, SpanContext] = {}
        """The contexts of requests that have not ended, on the scheduler side."""

    def begin(self, request_id: str, parent: SpanContext | None = None) -> SpanContext:
        """Make the context of a request. It is kept until :meth:`end`, and recorded by the caller."""
        context = self._contexts[request_id] = SpanContext.new(parent)
        return context

    def end(self, request_id: str) -> None:
        """Drop the context of a request."""
        self._contexts.pop(request_id, None)

    def traceparent_of(self, request_id: str) -> str:
        """Return the ``traceparent`` for parts of a request in other processes; empty if it has ended."""
        return str(self._contexts.get(request_id, ""))

    def trace_id_of(self, request_id: str) -> str:
        """Return the id of a request's trace; empty if it has ended."""
        context = self._contexts.get(request_id)
        return "" if context is None else context.trace_id

    def record(
        self,
        name: str,
        request_id: str,
        begun: float,
        ended: float | None = None,
        *,
        parent: SpanContext | str | None = None,
        context: SpanContext | None = None,
        reason: str = "",
        **attributes: Attribute,
    ) -> SpanContext:
        """Record a span that has ended, and return its context.

        Args:
            begun, ended: by ``time.perf_counter``, which is ``time.monotonic`` on Linux; ``ended`` is now by
                default.
            parent: the span that this one is a part of, or its ``traceparent``. ``None`` or an invalid text:
                this one begins a trace.
            context: its own context, if that was made before, because its parts were recorded earlier.
            reason: as :attr:`Span.reason`.
            attributes: what is known about it.
        """
        if isinstance(parent, str):
            parent = SpanContext.parse(parent)
        ended = time.perf_counter() if ended is None else ended
        if context is None:
            context = SpanContext.new(parent)
        span = Span(
            name=name,
            context=context,
            parent_id="" if parent is None else parent.span_id,
            request_id=_kept(request_id),
            start_ns=self._clock_offset() + round(begun * 1e9),
            duration_ns=max(0, round((ended - begun) * 1e9)),
            attributes=attributes,
            reason=reason,
        )
        with self._lock:
            self._spans.append(span)
            self._count += 1
        return context

    def _clock_offset(self) -> int:
        """Return nanoseconds to add to ``time.perf_counter``. They change only if the clock is set: no part
        may seem to begin before the whole."""
        before, wall, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        was_interrupted = after - before > _CLOCK_STEP_NS
        if abs(wall - before - self._offset_ns) > _CLOCK_STEP_NS and not was_interrupted:
            self._offset_ns = wall - before
        return self._offset_ns

    def record_layers(
        self,
        request_id: str,
        begun: float,
        arrivals: Sequence[tuple[int, float]],
        parent: SpanContext,
        *,
        is_verified: bool = False,
    ) -> None:
        """Record when a few groups of layers had arrived, as spans named transfer, one after the other.

        Args:
            arrivals: each time that more layers had arrived, with their number from then on.
            is_verified: they count as arrived only once their bytes were compared with checksums.
        """
        first, step = 0, -(-len(arrivals) // _MAX_GROUPS) or 1
        for end, arrived in reversed(arrivals[::-1][::step]):  # the last one is always among them
            self.record(
                "transfer",
                request_id,
                begun,
                arrived,
                parent=parent,
                first_layer=first,
                last_layer=end - 1,
                is_verified=is_verified,
            )
            first, begun = end, arrived

    def of_request(self, request_id: str) -> list[Span]:
        """Return the kept spans of a request, the earliest first, and all others in the same traces.

        ``request_id`` may be the beginning of the engine's id, since engines append to what clients know; or
        the id of a trace.
        """
        with self._lock:
            spans = list(self._spans)
        of_requests = (span for span in spans if span.request_id.startswith(_kept(request_id)))
        traces = {request_id, *(span.context.trace_id for span in of_requests)}
        return sorted((s for s in spans if s.context.trace_id in traces), key=lambda s: s.start_ns)

    def after(self, position: int) -> tuple[list[Span], int]:
        """Return the kept spans that were recorded after a position, and the new position; 0 is the first.

        If more spans were recorded since than are kept, the oldest of them are missing.
        """
        with self._lock:
            new = min(self._count - position, len(self._spans))
            return [self._spans[at] for at in range(len(self._spans) - new, len(self._spans))], self._count


def _kept(request_id: str) -> str:
    """Return the beginning of an id that a client may have chosen, as text that can be sent."""
    return request_id[:_MAX_ID].encode(errors="replace").decode()
