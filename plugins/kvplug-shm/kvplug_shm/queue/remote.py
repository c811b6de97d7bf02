"""The network half of the queue "shm": both functions that :mod:`kvplug_shm.queue.network` names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvplug.transport import Deadline, QueueEndpoint
from kvplug_shm.queue.network import Feed, NetworkHalf, Source
from kvplug_shm.queue.remote_contact import RemoteContact
from kvplug_shm.queue.remote_reader import RemoteReader
from kvplug_shm.queue.remote_writer import RemoteWriter


def serve(context: QueueEndpoint.Context, feed: Feed) -> NetworkHalf:
    """Listen on the context's host for remote readers.

    Raises:
        InsecureAddressError: there is neither a secret nor TLS.
        ConfigError: it is no address of this host, or a Unix socket.
        TransportError: listening failed for another reason.
    """
    return RemoteWriter(context, feed)


def attach(context: QueueEndpoint.Context, data: Mapping[str, Any], rank: int, deadline: Deadline) -> Source:
    """Join the queue whose network half gave ``data``, as reader ``rank``. Raises as ``create_from_handle``.

    Messages larger than this end's own option ``max_message_bytes`` allows are not accepted.
    """
    most = max(context.options.max_message_bytes, context.max_chunk_bytes)
    reader = RemoteReader(context, RemoteContact.from_plain(data), rank, most, deadline)
    try:
        reader.join_queue(deadline)
    except BaseException:
        reader.leave(died=True)
        reader.join(None)
        raise
    return reader
