"""The message queue: one writer, many readers, small values and tensors.

The names (``MessageQueue``, ``export_handle``, ``create_from_handle``, ``create_from_process_group``) follow
the shared-memory broadcast that engines have, without its defects: pickle, silence about slow readers, and
dead readers that block all others. A transport of kind "queue" implements :class:`QueueEndpoint` and the two
ends of :class:`MessageQueue`.
"""

from kvplug.transport.queue.endpoint import QueueEndpoint
from kvplug.transport.queue.handle import QueueHandle
from kvplug.transport.queue.queue import MAX_CHUNK_BYTES, MAX_CHUNKS, WARNING_INTERVAL_S, MessageQueue

__all__ = [
    "MAX_CHUNKS",
    "MAX_CHUNK_BYTES",
    "WARNING_INTERVAL_S",
    "MessageQueue",
    "QueueEndpoint",
    "QueueHandle",
]
