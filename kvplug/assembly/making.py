"""Calls a plugin's factory and checks what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from kvplug.engine.connector.scheduler import SchedulerConnector
from kvplug.engine.context import ConnectorContext
from kvplug.errors import KvplugError, PluginError
from kvplug.metrics.sinks import Sink
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.transport.communicator import DeviceCommunicator
from kvplug.transport.directory import Directory
from kvplug.transport.lookup import LookupEndpoint
from kvplug.transport.pipe import PipeEndpoint
from kvplug.transport.queue import QueueEndpoint
from kvplug.transport.spec import Kind
from kvplug.transport.store.blocking import BlockingStore
from kvplug.transport.store.store import Store

MADE: Final[Mapping[Kind, tuple[type, ...]]] = {
    Kind.PIPE: (PipeEndpoint.Context, PipeEndpoint),
    Kind.QUEUE: (QueueEndpoint.Context, QueueEndpoint),
    Kind.LOOKUP_BUFFER: (LookupEndpoint.Context, LookupEndpoint),
    Kind.COMMUNICATOR: (DeviceCommunicator.Context, DeviceCommunicator),
    Kind.DIRECTORY: (Directory.Context, Directory),
    Kind.STORE: (Store.Context, Store, BlockingStore),
    Kind.CONNECTOR: (ConnectorContext, SchedulerConnector),
    Kind.SINK: (object, Sink),
}
"""For each kind: the context class that a factory takes, and the classes that it may return."""


def made(
    spec: Any, context: Any, *, factory: Callable[..., Any] | None = None, wanted: type | None = None
) -> Any:
    """Call the spec's factory, or ``factory``, with a context, and return what it made.

    Raises:
        PluginError: the factory raised an error that is not kvplug's, or returned an object of another class.
        ResourceExhaustedError: a resource ran out.
        KvplugError: as the factory raised it.
    """
    factory = factory or spec.load_factory()
    classes = MADE[spec.kind][1:] if wanted is None else (wanted,)
    try:
        with NamedExhaustion(f"making {spec.called}"):
            found = factory(context)
    except KvplugError:
        raise
    except Exception as e:
        raise PluginError(f"{spec.called} cannot be made: {type(e).__name__}: {e}") from e
    if not isinstance(found, classes):
        names = " or ".join(each.__name__ for each in classes)
        raise PluginError(f"{spec.called} made {found!r}, which is not a {names}; subclass it")
    return found
