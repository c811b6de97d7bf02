"""The endpoint that makes both ends of the lookup buffer "simple"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplug.transport import LookupEndpoint
from kvplug_lookup.buffer.options import SimpleOptions
from kvplug_lookup.buffer.reach import ReachingEnd
from kvplug_lookup.buffer.store import SimpleStore

if TYPE_CHECKING:
    from kvplug.transport import Pipe


class SimpleEndpoint(LookupEndpoint):
    """Makes either end from the config."""

    def __init__(self, context: LookupEndpoint.Context) -> None:
        self._context = context
        self._options: SimpleOptions = context.options or SimpleOptions()

    def hold(self) -> SimpleStore:
        return SimpleStore(
            buffer_size=self._context.buffer_size,
            evict=self._options.evict,
            ttl_s=self._options.ttl_s,
            device=self._context.device,
            timeout_s=self._context.timeout_s,
        )

    def reach(self, signal: Pipe, data: Pipe) -> ReachingEnd:
        context = self._context
        return ReachingEnd(
            signal,
            data,
            device=context.device,
            timeout_s=context.timeout_s,
            max_message_bytes=context.max_message_bytes,
        )
