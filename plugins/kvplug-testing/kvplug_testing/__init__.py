"""What tests of kvplug, of its plugins and of yours are written with: public, shipped, light to import.

The conformance kit is one class for each ABC: subclass :class:`PipeContract`, name your transport in it, and
pytest judges it by the laws. :mod:`~kvplug_testing.peers` runs a test's functions in real child processes and
finds what they leave behind; :mod:`~kvplug_testing.waits` watches calls that could block;
:mod:`~kvplug_testing.faults` makes any pipe a faulty one, by a plan.
"""

from kvplug.door import Door

_door = Door(__name__, __path__[0])
__getattr__, __dir__ = _door, _door.names
