"""The pipe: ordered, point-to-point tensors between two processes, full duplex.

A transport of kind "pipe" implements :class:`PipeEndpoint` (and the :class:`PipeListener` and
:class:`Pipe` it hands out).
"""

from kvplug.transport.pipe.blocks import Blocks
from kvplug.transport.pipe.pipe import PathReport, Pipe, PipeContext, PipeEndpoint, PipeListener
from kvplug.transport.pipe.transfer import Transfer

__all__ = ["Blocks", "PathReport", "Pipe", "PipeContext", "PipeEndpoint", "PipeListener", "Transfer"]
