"""kvplug: the socket between LLM engines and KV cache transports.

Programs import from this package: a config, what is built from it, and the errors to catch. Authors of
transports import from :mod:`kvplug.transport`, authors of connectors and of adapters to engines from
:mod:`kvplug.engine`.
"""

from kvplug.door import Door

__version__ = "0.1.0"

_door = Door(__name__, __path__[0])
__getattr__, __dir__ = _door, _door.names
