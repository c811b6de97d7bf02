"""What tests of kvplug, of its plugins and of yours are written with: public, shipped, light to import.

The conformance kit is one class for each ABC: subclass :class:`PipeContract`, name your transport in it, and
pytest judges it by the laws. :mod:`~kvplug.testing.peers` runs a test's functions in real child processes and
finds what they leave behind; :mod:`~kvplug.testing.waits` watches calls that could block;
:mod:`~kvplug.testing.faults` makes any pipe a faulty one, by a plan.
"""

from __future__ import annotations

from typing import Any

_HOMES = {
    "PipeContract": "kvplug.testing.contract.pipe",
    "LookupBufferContract": "kvplug.testing.contract.lookup",
    "MessageQueueContract": "kvplug.testing.contract.queue",
    "DeviceCommunicatorContract": "kvplug.testing.contract.communicator",
    "ConnectorContract": "kvplug.testing.contract.connector",
    "check_plugin": "kvplug.testing.contract.plugin",
    "law": "kvplug.testing.contract.base",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
