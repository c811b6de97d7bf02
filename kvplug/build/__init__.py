"""The composition root: the only place where names become things.

Config + Registry -> a connector side, or a pipe. Everything below is handed what it needs.
"""

from kvplug.build.connector import build_connector, check_config, connector_class, required_layout
from kvplug.build.pipes import PipeServer, connect_pipe, listen_pipe

__all__ = [
    "PipeServer",
    "build_connector",
    "check_config",
    "connect_pipe",
    "connector_class",
    "listen_pipe",
    "required_layout",
]
