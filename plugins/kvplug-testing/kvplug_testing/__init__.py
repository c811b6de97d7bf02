"""Tools for tests of kvplug, of its plugins and of your plugins: public, shipped, light to import.

The conformance kit is one class for each ABC: subclass :class:`PipeContract`, name your transport in it, and
pytest checks it against the laws. :mod:`~kvplug_testing.peers` runs functions of a test in real child
processes and finds the resources that they leave behind; :mod:`~kvplug_testing.waits` watches calls that
could block.
"""

from kvplug.kit import Door

_door = Door(__name__, __path__[0])
__getattr__, __dir__ = _door, _door.names
