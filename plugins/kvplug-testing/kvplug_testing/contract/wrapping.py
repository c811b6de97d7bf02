"""Suites for transports that wrap another one of their kind: the inner one is the kit's "memory"."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import attrs

from kvplug import Registry
from kvplug.transport import Kind, PipeContext, PipeEndpoint, QueueContext, QueueEndpoint
from kvplug_testing.contract.pipe import PipeContract
from kvplug_testing.contract.queue import MessageQueueContract


class WrappingPipe(PipeContract):
    """Wraps the pipe "memory", which works in one process. The inner pipe limits the unsent bytes."""

    across_processes: ClassVar[bool] = False
    limit_option: ClassVar[str] = ""

    def make_endpoint(self, context: PipeContext) -> PipeEndpoint:
        return super().make_endpoint(_over_memory(self.kind, context))


class WrappingQueue(MessageQueueContract):
    """Wraps the message queue "memory", which works in one process."""

    across_processes: ClassVar[bool] = False

    def make_endpoint(self, context: QueueContext) -> QueueEndpoint:
        return super().make_endpoint(_over_memory(self.kind, context))


def _over_memory(kind: Kind, context: Any) -> Any:
    spec: Any = Registry.from_env().get(kind, "memory")
    cls = spec.load_options()
    inner = attrs.evolve(context, options=None if cls is None else cls())
    return attrs.evolve(context, make_inner=partial(spec.load_factory(), inner))
