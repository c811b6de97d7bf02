"""Names for authors of connectors and of adapters to engines."""

from kvplug.door import Door

_door = Door(__name__, __path__[0])
__getattr__, __dir__ = _door, _door.names
