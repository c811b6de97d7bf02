"""The factory of the pipe "shm": where to listen, and how a proven connection becomes a pipe.

The connecting end introduces itself. The listening end creates the memory, passes its descriptor with its
answer, and waits for the confirmation that it was mapped.
"""

from __future__ import annotations

import contextlib
import os

from kvplug import ConfigError
from kvplug.transport import Connection, Deadline, DuplexEndpoint, Pipe, PipeEndpoint, Segment
from kvplug_shm.joining import JoiningPeer
from kvplug_shm.memory.pool import Pool
from kvplug_shm.native.library import library
from kvplug_shm.options import ShmPipeOptions
from kvplug_shm.pipe.geometry import LARGEST_BYTES, LINE, SMALLEST_BYTES, RingSizes, lines
from kvplug_shm.pipe.pipe import ShmPipe, ShmPipeSettings


class ShmContact(DuplexEndpoint.Contact):
    """``shm1 <domain> <address>``: an abstract Unix socket, and the domain in which it can be reached."""

    TRANSPORT = "shm"
    ONLY_UNIX = True
    UNREACHABLE = (
        "the peer listens on an abstract Unix socket of another host or network namespace, and"
        " shares no memory with this process; use a pipe for several hosts, such as 'cpu'"
    )


class ShmEndpoint(DuplexEndpoint):
    """Listens on an abstract Unix socket, over which the memory is passed on. Its pipes share one pool."""

    CONTACT = ShmContact
    PURPOSE = "pipe-shm"

    def __init__(self, context: PipeEndpoint.Context) -> None:
        if context.device.partition(":")[0] != "cpu":
            raise ConfigError(f"the pipe 'shm' moves CPU tensors, and the device is {context.device!r}")
        library()  # raises, here rather than at the first pipe
        super().__init__(context)
        options: ShmPipeOptions = context.options if context.options is not None else ShmPipeOptions()
        slot_bytes = lines(options.slot_bytes)
        if options.slots * slot_bytes > LARGEST_BYTES:
            raise ConfigError(
                f"slots: {options.slots} slots of {slot_bytes} bytes were given; together they may have"
                f" {LARGEST_BYTES} bytes"
            )
        self._settings = ShmPipeSettings.of(
            context,
            max_in_flight_bytes=options.max_in_flight_bytes,
            spin_s=options.spin_us / 1e6,
            pool=Pool(options.pool_bytes),
        )
        self._slots, self._slot_bytes = options.slots, slot_bytes

    def _join(self, connection: Connection, deadline: Deadline, *, accepted: bool) -> Pipe:
        peer: JoiningPeer | None = None
        try:
            peer = JoiningPeer(connection, self._settings.heartbeat_timeout_s, deadline)
            segment, sizes = self._create_memory(peer) if accepted else self._map_memory(peer)
            return ShmPipe(peer, segment, sizes, self._settings, accepted=accepted)
        except BaseException:
            if not accepted:  # the acceptor first tells the peer which resource ran out
                connection.close()
            raise
        finally:
            if peer is not None:
                peer.close()

    def _create_memory(self, peer: JoiningPeer) -> tuple[Segment, RingSizes]:
        """The listening end. Zeroed memory is two empty rings: there is nothing to initialise."""
        if not peer.agrees(peer.receive()):
            raise peer.not_understood()
        sizes = RingSizes.of(self._slots, self._slot_bytes)
        segment, fd = Segment.create("pipe", sizes.segment_nbytes)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, fd)
            peer.introduce({"slots": self._slots, "slot_bytes": self._slot_bytes}, [fd])
        peer.expect("there")
        return segment, sizes

    def _map_memory(self, peer: JoiningPeer) -> tuple[Segment, RingSizes]:
        """The connecting end."""
        peer.introduce({})
        match peer.receive(max_fds=1):
            case {"slots": int(slots), "slot_bytes": int(slot_bytes)} as answer if (
                peer.agrees(answer)
                and len(peer.fds) == 1
                and min(slots, slot_bytes) > 0
                and slots * slot_bytes % LINE == 0
                and SMALLEST_BYTES <= slots * slot_bytes <= LARGEST_BYTES
            ):
                sizes = RingSizes.of(slots, slot_bytes)
                segment = Segment.attach(peer.fds[0], sizes.segment_nbytes)
                peer.send("there")
                return segment, sizes
        raise peer.not_understood()
