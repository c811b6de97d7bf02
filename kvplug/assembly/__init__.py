"""The composition root: the only room that resolves names to objects.

Config + Registry -> a connector side, a pipe, a message queue, a lookup buffer or a device communicator.
Everything below receives its dependencies as arguments.
"""

from kvplug.assembly.communicators import build_communicator
from kvplug.assembly.connector import (
    build_connector,
    check_config,
    connector_class,
    explain_missing_pipe,
    required_layout,
)
from kvplug.assembly.lookups import build_lookup
from kvplug.assembly.pipes import PipeServer, build_pipe_endpoint, connect_pipe, listen_pipe
from kvplug.assembly.queues import build_queue

__all__ = [
    "PipeServer",
    "build_communicator",
    "build_connector",
    "build_lookup",
    "build_pipe_endpoint",
    "build_queue",
    "check_config",
    "connect_pipe",
    "connector_class",
    "explain_missing_pipe",
    "listen_pipe",
    "required_layout",
]
