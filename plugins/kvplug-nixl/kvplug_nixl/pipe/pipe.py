"""The pipe "nixl": each end reads messages from the other end's memory, with NIXL.

A sender registers the memory of a message and offers it to the peer. The receiver reads it, in pieces, to
where it belongs, and then reads the peer's fence: a few bytes that the peer changes before it takes any
memory back. So what is returned was the message while it was read. Small messages travel in their offer.

Where UCX needs the peer's help for a read, a stopped peer leaves one under way for as long as it likes, and
it may continue later: such reads go through memory of the pipe's, and the next call resumes them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from kvplug import KvplugError, PeerGoneError, TransportError
from kvplug.net.wire.tensors import memory_of, memory_of_writable
from kvplug.transport import Deadline, OfferPipe, Pipe, WireError
from kvplug_nixl.agent import HOST, Agent, Exported, NixlError, Read, Region, Span
from kvplug_nixl.pipe.fence import OwnFence, PeerFence

if TYPE_CHECKING:
    from torch import Tensor

DEVICES: Final = ("cpu", "cuda")
"""Types of devices whose tensors are carried."""
_MAX_INLINE_BYTES: Final = 4096
_MAX_METADATA: Final = 8 << 20
_SPAN: Final = struct.Struct("<QQQ")
_PIECE_BYTES = 32 << 20
"""Of a message that is read at once: the deadline and the peer are looked at in between."""
_HELPED_BYTES: Final = 4 << 20
"""The same, where reads need the peer's help."""
_READ_S: Final = 5.0
"""Seconds that a call waits for a read under way which needs no help of the peer."""
_NOTICE_S: Final = 1.0
"""Seconds until the worker has noticed a peer whose memory is gone."""


class NixlDevice(OfferPipe.Device):
    """The device of new tensors. Messages may lie on any other that NIXL reads."""

    def carries(self, given: Any) -> bool:
        return given.device.type in DEVICES


@attrs.frozen(kw_only=True)
class NixlPipeSettings(OfferPipe.Settings):
    """Sizes are in bytes."""

    inline_bytes: int
    expected_gb_per_s: float


@attrs.frozen(kw_only=True)
class Lanes:
    """What carries the reads of one end of a pipe."""

    text: str
    """UCX's description; "unknown" if UCX was loaded before kvplug could read its log."""
    gb_per_s: float
    """Measured when the pipe began, in 10^9 bytes per second."""
    need_help: bool
    """Whether reads continue only while the peer serves them."""


@attrs.frozen(eq=False)
class _Place:
    """Where the bytes of an offered message lie."""

    spans: tuple[Span, ...]
    device: int
    """The index of the GPU whose memory it is; -1: the host's."""
    metadata: bytes
    """Metadata that NIXL has to load first; may be empty."""
    starts_anew: bool
    """The metadata replaces all that came before."""


class _Reading:
    """A message that is being read."""

    def __init__(self) -> None:
        self.pending: tuple[Read, int] | None = None
        """A read that was begun, and its number of bytes."""
        self.local: list[Span] = []
        self.regions: list[Region] = []
        """Those that the read needs."""
        self.is_loaded = False
        """The agent knows the memory that the message lies in."""


class NixlPipe(OfferPipe):
    """One agent, and a fence at each end."""

    NAME = "nixl"
    MAX_OFFERS = 32  # with inline messages they fit the buffers of a connection
    MAX_RUNS = 64
    AWAITS_DEVICE = True

    def __init__(
        self,
        join: OfferPipe.Join,
        agent: Agent,
        fences: tuple[OwnFence, PeerFence],
        lanes: Lanes,
        settings: NixlPipeSettings,
    ) -> None:
        """Take over everything, unless this raises.

        Raises:
            ResourceExhaustedError: there are no more threads.
        """
        super().__init__(join, settings)
        self.lanes: Final = lanes
        self._settings = settings
        self._agent = agent
        self._fence, self._peer_fence = fences
        self._landing: Tensor | None = None
        """Memory for reads that need the peer's help."""
        self._landing_local: list[Span] = []
        self._helps = False
        """Whether the peer is reading, and UCX needs this process for it."""
        self._start()

    @property
    def route(self) -> str:
        """The lanes of this end's reads."""
        return f"nixl {self.lanes.text}"

    def path_report(self) -> Pipe.PathReport:
        return Pipe.PathReport(
            measured_gb_per_s=self.lanes.gb_per_s,
            expected_gb_per_s=self._settings.expected_gb_per_s,
            reason=f"UCX reads through {self.lanes.text}; it chose these lanes among the transports of"
            " UCX_TLS and the devices of UCX_NET_DEVICES, which may leave out faster ones",
        )

    # -- sending -----------------------------------------------------------------------------------------

    def _prepare(self, message: OfferPipe.SentMessage) -> None:
        if message.content.nbytes <= self._settings.inline_bytes:
            message.is_copied = True
            return
        try:
            message.place = self._agent.export(message.content.tensors)
        except NixlError:
            if self._lifecycle.ended:  # which closes the agent
                raise self._lifecycle.error() from None
            raise

    def _place_of(self, offer: OfferPipe.Offer) -> Any:
        message, exported = offer.message, offer.place
        tensors = message.content.tensors
        if exported is None:
            message.drop_tensors()
            with self._stream.current():
                return b"".join(bytes(memory_of(each.cpu())) for each in tensors)
        spans = b"".join(_SPAN.pack(*span) for span in exported.spans)
        return [spans, _gpu_of(tensors[0]), exported.metadata, exported.starts_anew]

    def _taken_back(self, offer: OfferPipe.Offer) -> None:
        self._helps = False

    def _forget(self, message: OfferPipe.SentMessage) -> None:
        if isinstance(message.place, Exported):
            self._agent.release(message.place.regions)

    def _on_value(self, kind: str, content: list[Any]) -> None:
        if kind != "reading":
            super()._on_value(kind, content)
        self._helps = any(offer.place is not None for offer in self._announced)

    def _step(self) -> bool:
        is_busy = super()._step()
        if self._helps:
            self._agent.progress()
        return is_busy or self._helps

    # -- receiving ---------------------------------------------------------------------------------------

    def _read_place(self, meta: Any, nbytes: int, place: Any) -> Any:
        if nbytes != (0 if meta is None else meta.nbytes):
            raise WireError("it offers a part of a message")
        match place:
            case bytes() if len(place) == nbytes <= _MAX_INLINE_BYTES:
                return place
            case [bytes(spans), int(device), bytes(metadata), bool(starts_anew)] if (
                -1 <= device < 1 << 16 and len(metadata) <= _MAX_METADATA
            ):
                return _Place(_spans_of(spans, nbytes), device, metadata, starts_anew)
        raise WireError("it offers memory that cannot be")

    def _carried(self, message: OfferPipe.ComingMessage) -> Tensor | None:
        if not isinstance(message.place, bytes) or self._device.name != "cpu":
            return None
        assert message.meta is not None
        own = self._new_tensor(message.meta)
        memory_of_writable(own)[:] = message.place
        return own

    def _survives(self, offer: OfferPipe.ComingOffer) -> bool:
        return isinstance(offer.place, bytes)

    def _move(
        self,
        message: OfferPipe.ComingMessage,
        memory: list[Tensor],
        deadline: Deadline,
        *,
        in_place: bool,
    ) -> bool:
        if isinstance(message.place, bytes):
            import torch

            self._put(memory, 0, torch.frombuffer(bytearray(message.place), dtype=torch.uint8))
            message.got = message.nbytes
        elif not self._read_all(message, message.place, memory, deadline, in_place=in_place):
            return False
        self._take()
        return True

    def _read_all(
        self,
        message: OfferPipe.ComingMessage,
        place: _Place,
        memory: list[Tensor],
        deadline: Deadline,
        *,
        in_place: bool,
    ) -> bool:
        """Read the rest of a message, and make sure that it was the peer's until then."""
        reading = message.state = message.state or _Reading()
        landing = self._landed() if self.lanes.need_help else None
        # Memory of the caller must be left alone when the call ends.
        must_end = in_place and landing is None
        until = Deadline.after(_READ_S) if must_end else deadline
        try:
            if not reading.is_loaded:
                self._agent.load(place.metadata, starts_anew=place.starts_anew)
                reading.is_loaded = True
            if landing is None and not reading.regions:
                reading.local, reading.regions = self._agent.register(memory)
            while message.got < message.nbytes:
                if reading.pending is None:
                    reading.pending = self._begin(message, reading, place, _gpu_of(memory[0]))
                read, nbytes = reading.pending
                if not self._ends(read, until, must_end=must_end):
                    if must_end:
                        self._hung.append(memory)
                        raise TransportError(
                            "a read does not end: the memory that was given may still be written to"
                        )
                    return False
                is_last = message.got + nbytes == message.nbytes
                if is_last and not self._peer_fence.check(lambda fence: self._ends(fence, until)):
                    if must_end:
                        reading.pending = None  # it is read again, into other memory
                    return False
                reading.pending = None
                if landing is not None:
                    self._put(memory, message.got, landing[:nbytes])
                message.got += nbytes
                if deadline.expired and not is_last:
                    return False
        except (NixlError, PeerGoneError) as e:
            reading.pending = None
            self._raise_if_gone(e)
            raise
        finally:
            if reading.pending is None:
                self._agent.release(reading.regions)
                reading.regions = []
        return True

    def _landed(self) -> Tensor:
        import torch

        if self._landing is None:
            self._landing = torch.empty(_HELPED_BYTES, dtype=torch.uint8)
            self._landing_local, _ = self._agent.register([self._landing])
        return self._landing

    def _begin(
        self, message: OfferPipe.ComingMessage, reading: _Reading, place: _Place, here: int
    ) -> tuple[Read, int]:
        """Begin the next read; return it with its number of bytes."""
        left = message.nbytes - message.got
        if self.lanes.need_help:
            nbytes, here = min(_HELPED_BYTES, left), HOST
            ours = self._cut(self._landing_local, 0, nbytes)
        else:
            nbytes = min(_PIECE_BYTES, left)
            ours = self._cut(reading.local, message.got, nbytes)
        mine, theirs = _matched(ours, self._cut(place.spans, message.got, nbytes))
        return self._agent.read(mine, theirs, here=here, there=place.device), nbytes

    def _cut(self, spans: Sequence[Span], start: int, nbytes: int) -> list[Span]:
        return [
            (address, length, spans[index][2]) for index, address, length in self.cut(spans, start, nbytes)
        ]

    def _put(self, memory: list[Tensor], start: int, piece: Tensor) -> None:
        """Copy bytes of the host into contiguous tensors, after their first ``start`` bytes."""
        at = 0
        with self._copying(*memory):
            for index, address, length in self.cut(self.spans_of(memory), start, len(piece)):
                flat = self.bytes_of(memory[index])
                begin = address - flat.data_ptr()
                flat[begin : begin + length].copy_(piece[at : at + length])
                at += length

    def _ends(self, read: Read, deadline: Deadline, *, must_end: bool = False) -> bool:
        """Wait for a read. Return False if the deadline has passed, and it is still under way.

        ``must_end``: it writes to memory of the caller, so the pipe's end is looked at only after it.

        Raises:
            KvplugError: the pipe has ended, or the read has failed.
        """
        has_asked = False

        def check() -> None:
            nonlocal has_asked
            if not has_asked:
                has_asked = True
                self._tell("reading")
            if not must_end:
                self._coming.check()

        if not self._poll(read.is_done, check, deadline):
            return False
        self._coming.check()
        return True

    def _raise_if_gone(self, error: KvplugError) -> None:
        """Raise how the pipe ended, if it did: a peer that ends takes its memory along, which may be seen
        before the end itself."""
        self._poll(lambda: self._lifecycle.ended, lambda: None, Deadline.after(_NOTICE_S))
        if self._lifecycle.ended:
            raise self._lifecycle.error() from error

    # -- how it ends -------------------------------------------------------------------------------------

    def _revoke(self) -> bool:
        self._fence.take_back()
        return True

    def _free(self) -> None:
        if self._incoming is not None and self._incoming.state is not None:
            pending, self._incoming.state.pending = self._incoming.state.pending, None
            if pending is not None:
                pending[0].forget()
        self._peer_fence.forget()
        self._agent.close()
        self._hung.clear()


def _gpu_of(tensor: Tensor) -> int:
    """Return the index of the GPU that a tensor's memory is on, or :data:`HOST`."""
    device = tensor.untyped_storage().device
    return HOST if device.type == "cpu" else int(device.index)


def _spans_of(packed: bytes, nbytes: int) -> tuple[Span, ...]:
    if len(packed) % _SPAN.size or not 0 < len(packed) <= NixlPipe.MAX_RUNS * _SPAN.size:
        raise WireError("it offers memory in spans that cannot be")
    spans = tuple(_SPAN.iter_unpack(packed))
    if sum(length for _, length, _ in spans) != nbytes or not nbytes:
        raise WireError("it offers another number of bytes than it announces")
    if any(not length or not address or address + length >= 1 << 63 for address, length, _ in spans):
        raise WireError("it offers memory that cannot be")
    return spans


def _matched(one: Sequence[Span], other: Sequence[Span]) -> tuple[list[Span], list[Span]]:
    """Cut both, which have the same total length, wherever one of them is cut."""
    ones, others = list[Span](), list[Span]()
    theirs = iter(other)
    address, left, number = next(theirs, (0, 0, 0))
    for mine, length, my_number in one:
        while length:
            step = min(length, left)
            ones.append((mine, step, my_number))
            others.append((address, step, number))
            mine, length = mine + step, length - step
            address, left = address + step, left - step
            if not left:
                address, left, number = next(theirs, (0, 0, 0))
    return ones, others
