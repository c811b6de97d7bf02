"""The parts that all pipes between two processes share; a transport implements how bytes move.

- :mod:`~kvplug.transport.duplex.endpoint`: contacts, listening and connecting
- :mod:`~kvplug.transport.duplex.pipe`: a pipe, the window of its sender, and how it ends
- :mod:`~kvplug.transport.duplex.partial`: a message of which a part has arrived, and its bound
"""
