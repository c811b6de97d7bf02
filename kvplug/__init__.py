"""kvplug connects LLM engines to KV cache transports.

Programs import the config, the functions that build objects from it, and the errors from this package.
Authors of transports import from :mod:`kvplug.transport`. Authors of connectors and of engine adapters import
from :mod:`kvplug.engine`.
"""

from kvplug.door import Door

__version__ = "0.1.0"

_door = Door(__name__, __path__[0])
__getattr__, __dir__ = _door, _door.names
