"""Options of the transports "shm". Light: imported by ``kvplug list``."""

from __future__ import annotations

import attrs

from kvplug.transport import option


@attrs.frozen(kw_only=True)
class ShmPipeOptions:
    """How much memory the pipe "shm" may take, and how its ends wait."""

    slots: int = option(
        default=8,
        unit="slots",
        at_least=1,
        help="Slots of each of a pipe's two rings, one each way. What the accepting end says counts.",
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
        help="Bytes that send_tensor queues, together with what the ring holds unread, before it blocks. One"
        " larger message passes alone.",
    )
    pool_bytes: int = option(
        default=256 * 1024 * 1024,
        unit="bytes",
        at_least=0,
        help="Memory of received tensors that an endpoint keeps, once they are gone, for the next ones.",
    )
    spin_us: int = option(
        default=50,
        unit="microseconds",
        at_least=0,
        help="How long an end that waits looks again and again before it sleeps, which takes it longer to"
        " wake from.",
    )
    native: bool = option(
        default=True,
        help="Whether the compiled steps are used where they were built; without them Python takes the same"
        " ones, slower.",
    )


@attrs.frozen(kw_only=True)
class ShmQueueOptions:
    """How much memory the queue "shm" may take, and how its ends wait."""

    max_message_bytes: int = option(
        default=1024 * 1024 * 1024,
        unit="bytes",
        at_least=1,
        help="The largest message. Addresses are set aside for it, and memory when a message is that large.",
    )
    keep_bytes: int = option(
        default=512 * 1024 * 1024,
        unit="bytes",
        at_least=0,
        help="Shared memory that a queue keeps for its next messages. What messages larger than a chunk took"
        " beyond it goes back to the system when they have been read.",
    )
    pool_bytes: int = option(
        default=256 * 1024 * 1024,
        unit="bytes",
        at_least=0,
        help="Memory of received tensors that a reader keeps, once they are gone, for those that come next.",
    )
    spin_us: int = option(
        default=50,
        unit="microseconds",
        at_least=0,
        help="How long an end that waits looks again and again before it sleeps, which takes it longer to"
        " wake from.",
    )
    native: bool = option(
        default=True,
        help="Whether the compiled steps are used where they were built; without them Python takes the same"
        " ones, slower.",
    )
