"""The parts that all pipes between two processes share; a transport implements how bytes move.

- :mod:`~kvplug.transport.duplex.endpoint`, :mod:`~kvplug.transport.duplex.contact`: listening and connecting
- :mod:`~kvplug.transport.duplex.join`: the messages before a pipe, and the watch on the other end
- :mod:`~kvplug.transport.duplex.window`: what was sent and is not yet taken
- :mod:`~kvplug.transport.duplex.partial`: a message of which a part has arrived, and its bound
- :mod:`~kvplug.transport.duplex.lifecycle`, :mod:`~kvplug.transport.duplex.pipe`: how a pipe ends
"""
