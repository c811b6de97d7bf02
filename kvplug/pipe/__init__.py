"""The pipe: ordered, point-to-point tensors between two processes, full duplex.

A transport of kind "pipe" implements :class:`PipeEndpoint` (and the :class:`PipeListener` and
:class:`Pipe` it hands out).
"""

from kvplug.pipe.blocks import Blocks
from kvplug.pipe.pipe import Pipe, PipeEndpoint, PipeListener
from kvplug.pipe.transfer import Transfer
from kvplug.pipe.turn import Turn

__all__ = ["Blocks", "Pipe", "PipeEndpoint", "PipeListener", "Transfer", "Turn"]
