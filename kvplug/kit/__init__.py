"""Names of the core for the conformance kit, beyond the public names for plugins. Plugins do not import them.

The kit tests what the core builds (connections of ranks, recorded and staged stores, figures), inspects
installed plugins and their options, and alters peers' messages in the core's formats. A name stays until the
minor version changes.
"""

from kvplug.door import Door

_door = Door(__name__, __path__[0])
__getattr__, __dir__ = _door, _door.names
