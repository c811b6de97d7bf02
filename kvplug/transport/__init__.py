"""For authors of transports: specs, contexts, the ABCs of each kind, and parts to build transports from."""

from kvplug.door import Door

_door = Door(__name__, __path__[0])
__getattr__, __dir__ = _door, _door.names
