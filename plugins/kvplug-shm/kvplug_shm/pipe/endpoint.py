"""The factory of the pipe "shm": where to listen, and how to connect."""

from __future__ import annotations

from kvplug import ConfigError
from kvplug.transport import Connection, Deadline, DuplexEndpoint, Pipe, PipeEndpoint
from kvplug_shm.memory.pool import Pool
from kvplug_shm.native.library import library
from kvplug_shm.options import ShmPipeOptions
from kvplug_shm.pipe import join
from kvplug_shm.pipe.contact import ShmContact
from kvplug_shm.pipe.geometry import LARGEST_BYTES, lines
from kvplug_shm.pipe.pipe import ShmPipeSettings


class ShmEndpoint(DuplexEndpoint):
    """Listens on an abstract Unix socket, over which the memory is passed on. Its pipes share one pool."""

    CONTACT = ShmContact
    PURPOSE = join.PURPOSE

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
            slots=options.slots,
            slot_bytes=slot_bytes,
            max_in_flight_bytes=options.max_in_flight_bytes,
            spin_s=options.spin_us / 1e6,
            pool=Pool(options.pool_bytes),
        )

    def _join(self, connection: Connection, deadline: Deadline, *, accepted: bool) -> Pipe:
        return (join.accept if accepted else join.connect)(connection, self._settings, deadline)
