"""Options of the transports "shm". Light: imported by ``kvplug list``."""

from __future__ import annotations

import attrs

from kvplug.transport import option


@attrs.frozen(kw_only=True)
class _ShmOptions:
    pool_bytes: int = option(
        default=256 * 1024 * 1024,
        unit="bytes",
        at_least=0,
        takes_memory=True,
        help="Memory of freed received tensors that is kept and reused for the next ones. All pipes of an"
        " endpoint share it; each reader of a queue has its own.",
    )
    spin_us: int = option(
        default=50,
        unit="microseconds",
        at_least=0,
        help="Spin for this long before sleeping. Longer lowers wake-up latency and uses more CPU.",
    )


@attrs.frozen(kw_only=True)
class ShmPipeOptions(_ShmOptions):
    """Memory of the pipe "shm", and how its ends wait."""

    slots: int = option(
        default=8,
        unit="slots",
        at_least=1,
        help="Slots in each of a pipe's two rings, one per direction. More let the sender run further ahead"
        " of the receiver. Beside busy processes the ring grows to up to eight times as many. The accepting"
        " end's value is used.",
    )
    slot_bytes: int = option(
        default=256 * 1024,
        unit="bytes",
        at_least=1024,
        help="Size of a slot. The whole ring is fastest at about twice the size of one core's L2 cache.",
    )
    max_in_flight_bytes: int = option(
        default=256 * 1024 * 1024,
        unit="bytes",
        at_least=1,
        help="send_tensor blocks while more bytes than this are queued or unread in the ring. A single larger"
        " message is sent alone.",
    )


@attrs.frozen(kw_only=True)
class ShmQueueOptions(_ShmOptions):
    """Memory of the queue "shm", and how its ends wait."""

    max_message_bytes: int = option(
        default=1024 * 1024 * 1024,
        unit="bytes",
        at_least=1,
        help="The largest message. Higher reserves more address space; only large messages use more memory.",
    )
    keep_bytes: int = option(
        default=512 * 1024 * 1024,
        unit="bytes",
        at_least=0,
        takes_memory=True,
        help="Shared memory that a queue keeps for its next messages. Memory beyond it goes back to the"
        " system when the messages that took it have been read.",
    )
