"""What the conformance kit uses of the core beyond the public names for plugins. Plugins do not import it.

The kit judges what the core builds (connections of ranks, recorded and staged stores, figures), looks into
installed plugins and their options, and changes what peers say in the core's formats. A name stays until the
second number of the version changes.
"""

from kvplug.door import Door

_door = Door(__name__, __path__[0])
__getattr__, __dir__ = _door, _door.names
