"""The parts that all pipes between two processes share; a transport implements how bytes move.

- :mod:`~kvplug.transport.duplex.endpoint`, :mod:`~kvplug.transport.duplex.contact`: listening and connecting
- :mod:`~kvplug.transport.duplex.join`, :mod:`~kvplug.transport.duplex.heartbeat`: the messages before a pipe
- :mod:`~kvplug.transport.duplex.window`: what was sent and is not yet taken
- :mod:`~kvplug.transport.duplex.partial`: a message of which a part has arrived
- :mod:`~kvplug.transport.duplex.lifecycle`, :mod:`~kvplug.transport.duplex.pipe`: how a pipe ends
- :mod:`~kvplug.transport.duplex.descriptors`: when its descriptors are closed
"""
