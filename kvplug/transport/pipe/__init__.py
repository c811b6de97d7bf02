"""The pipe: ordered, point-to-point tensors between two processes, full duplex.

A transport of kind "pipe" implements :class:`PipeEndpoint`, and the :class:`PipeListener` and :class:`Pipe`
that the endpoint returns. The code that all pipes between two processes share is here, too:

- :mod:`~kvplug.transport.pipe.endpoint`: contacts, listening and connecting
- :mod:`~kvplug.transport.pipe.pipe`: a pipe, its calls, and how it ends
- :mod:`~kvplug.transport.pipe.transfer`: a message being sent, and the sender's window
- :mod:`~kvplug.transport.pipe.partial`: a message that has partly arrived
- :mod:`~kvplug.transport.pipe.blocks`: blocks of a paged cache as one message

Pipes whose receiver moves messages out of the sender's memory share more:

- :mod:`~kvplug.transport.pipe.offers`: their base class
- :mod:`~kvplug.transport.pipe.content`: the memory of a message
- :mod:`~kvplug.transport.pipe.device`: ordering with the caller's stream, and allocation of tensors
- :mod:`~kvplug.transport.pipe.join`: how a proven connection becomes a pipe
"""

from kvplug.transport.pipe.blocks import Blocks
from kvplug.transport.pipe.endpoint import PipeEndpoint, PipeListener
from kvplug.transport.pipe.pipe import Pipe
from kvplug.transport.pipe.transfer import Transfer

__all__ = ["Blocks", "Pipe", "PipeEndpoint", "PipeListener", "Transfer"]
