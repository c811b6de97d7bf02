"""The consumer's worker: pulls the KV of requests out of producers' blocks into its own."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs

from kvplug import (
    ClosedError,
    HandshakeError,
    IntegrityError,
    KvplugError,
    PeerGoneError,
    TimeoutError,
)
from kvplug.engine import NO_BLOCK, BlockViews, ConnectorContext, EntryGoneError, LayoutError, PeerLink
from kvplug.transport import (
    BackgroundThread,
    Deadline,
    DeviceMark,
    NamedExhaustion,
    Pipe,
    WireError,
    close_after_fork,
)
from kvplug_p2p.lender import PIPE, PULL
from kvplug_p2p.plan import PullPlan
from kvplug_p2p.sharing import HeadRange, unit_of, units
from kvplug_p2p.views import HASHED_TOGETHER, CacheViews, OwnStream, hash_of, hash_rows

_log = logging.getLogger(__name__)

_Message = list[tuple[list[int], list[int]]]
"""For each group, units of the producer and of this worker."""

MAX_MESSAGE_BYTES: Final = 64 << 20
"""Limit on the units of one request; the producer hashes and sends them as one message per group."""
_JOIN_S: Final = 3.0
_CHECK_S: Final = 2.0
"""How often an idle thread checks that its producer is still connected."""


class Pull:
    """KV on its way into one request's blocks, from one or several of the producer's workers."""

    def __init__(self, plan: PullPlan, num_layers: int, after: DeviceMark, timeout_s: float) -> None:
        self.plan = plan
        self.after = after
        """The work that the device must complete before the blocks are written."""
        self.deadline = Deadline.after(timeout_s)
        self.began = time.perf_counter()
        self.parts: list[Part] = []
        self.arrivals: list[tuple[int, float]] = []
        """Each time that more layers had arrived in all parts, with their number."""
        self.nbytes = 0
        self.verify_seconds = 0.0
        """Time spent on hashing what had arrived; 0: nothing is hashed."""
        self.num_layers = num_layers
        """Layers of all KV cache groups."""
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._error: BaseException | None = None

    @property
    def request_id(self) -> str:
        return self.plan.request_id

    @property
    def error(self) -> BaseException | None:
        """Why it failed; ``None`` while it is under way and after success."""
        return self._error

    def fail(self, error: BaseException) -> None:
        """End the pull: it failed or is not needed. Writes into its blocks stop shortly after."""
        with self._lock:
            if self._error is None and not self._is_done:
                self._error = error
            self._changed.notify_all()
        for part in self.parts:
            part.worker.interrupt(part)

    @property
    def _is_done(self) -> bool:
        # A pull that could not begin has no parts, and is not done.
        return bool(self.parts) and all(part.num_layers == self.num_layers for part in self.parts)

    @property
    def has_ended(self) -> bool:
        """Whether it is done, or has failed and nothing is written into its blocks any more."""
        return (self._error is not None or self._is_done) and not any(
            part.is_receiving for part in self.parts
        )

    def wait_settled(self, timeout: float) -> bool:
        """After a failure, wait until nothing is written any more. Return whether that took at most
        ``timeout`` seconds."""
        with self._lock:
            return self._changed.wait_for(lambda: not any(part.is_receiving for part in self.parts), timeout)

    def wait_for_layers(self, count: int) -> None:
        """Wait until the first ``count`` layers have arrived, or the pull has failed."""

        def have_arrived() -> bool:
            return self._error is not None or all(part.num_layers >= count for part in self.parts)

        with self._lock:
            in_time = self._changed.wait_for(have_arrived, self.deadline.remaining())
        if not in_time:
            self.fail(TimeoutError(f"the KV of request {self.request_id!r:.100} did not arrive in time"))

    # -- called by the thread of a producer's worker -------------------------------------------

    def begin_receiving(self, part: Part) -> bool:
        """Return whether the pull is still wanted; if so, its blocks may be written from now on."""
        with self._lock:
            part.is_receiving = self._error is None
            return part.is_receiving

    def end_receiving(self, part: Part) -> None:
        with self._lock:
            part.is_receiving = False
            self._changed.notify_all()

    def arrived(self, part: Part, num_layers: int) -> None:
        """Note that the first ``num_layers`` layers of the part have arrived and are verified."""
        with self._lock:
            part.num_layers = num_layers
            whole = min(each.num_layers for each in self.parts)
            if whole > (self.arrivals[-1][0] if self.arrivals else 0):
                self.arrivals.append((whole, time.perf_counter()))
            self._changed.notify_all()


@attrs.define(eq=False)
class Part:
    """The heads of a pull that come from one of the producer's workers."""

    pull: Pull
    worker: ProducerWorker
    heads: HeadRange
    num_layers: int = 0
    is_receiving: bool = False


class ProducerWorker:
    """The link to one worker of a producer: a thread connects when needed, and pulls part after part."""

    def __init__(
        self, context: ConnectorContext, views: CacheViews, engine_id: str, peer: Any, rank: int
    ) -> None:
        self._context = context
        self._views = views
        self._engine_id = engine_id
        self.peer = peer
        """Its address, as ``Peers.connect`` takes it."""
        self._rank = rank
        self._lock = threading.Lock()
        self._closed = False
        self._link: PeerLink | None = None
        self._pipe: Pipe | None = None
        self._current: Part | None = None
        self._waiting: queue.SimpleQueue[Part | None] = queue.SimpleQueue()
        self._was_used = False
        self.last_used = time.monotonic()
        self.route = ""
        """The transport that moves its KV, for display."""
        self._thread = BackgroundThread(self._run, name="kvplug-p2p-pull", stop=self.end)
        with NamedExhaustion(f"pulling from worker {rank} of a producer"):
            self._thread.start()
        close_after_fork(self)

    def _after_fork_in_child(self) -> None:
        self._closed, self._link, self._pipe = True, None, None

    @property
    def link(self) -> PeerLink | None:
        """The link; ``None`` while it is not connected."""
        return self._link

    @property
    def has_ended(self) -> bool:
        """Whether it was closed, or the producer has left."""
        return self._closed

    def pull(self, part: Part) -> None:
        """Queue the part. Does not wait."""
        self.last_used = time.monotonic()
        with self._lock:
            is_closed, self._was_used = self._closed, True
            if not is_closed:
                self._waiting.put(part)
        if is_closed:
            part.pull.fail(PeerGoneError(f"worker {self._rank} of {self._engine_id} has left"))

    def interrupt(self, part: Part) -> None:
        """Stop receiving this part. The rest of its message cannot be skipped, so the connection ends too."""
        with self._lock:
            if self._current is part:
                self._drop()

    def _drop(self) -> None:
        if self._pipe is not None:
            self._pipe.abort()
        if self._link is not None:
            self._link.close()

    def end(self) -> None:
        """End the connection without waiting for the thread."""
        with self._lock:
            self._closed = True
            self._drop()
        self._waiting.put(None)

    def close(self) -> None:
        self.end()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        stream = OwnStream(self._views.device)
        try:
            while True:
                try:
                    part = self._waiting.get(timeout=_CHECK_S)
                except queue.Empty:
                    if self._has_left():
                        break
                    continue
                if part is None:
                    break
                self._pull_part(part, stream)
                with self._lock:
                    is_idle = self._link is not None and self._link.channel.closed
                    if is_idle:
                        self._link = self._pipe = None
        finally:
            stream.close()
            with self._lock:
                self._closed = True
                self._drop()
            with contextlib.suppress(queue.Empty):
                while True:
                    left = self._waiting.get_nowait()
                    if left is not None:
                        left.pull.fail(ClosedError("the connector was shut down"))

    def _has_left(self) -> bool:
        """Whether the producer has ended the link. The next pull makes a new one."""
        if self._link is None:
            return self._was_used
        if self._pipe is None:  # another thread is connecting
            return False
        try:
            self._link.channel.recv(timeout=0)  # the producer only sends answers
        except TimeoutError:
            return False
        except KvplugError:
            pass
        return True

    def _pull_part(self, part: Part, stream: OwnStream) -> None:
        pull = part.pull
        with self._lock:
            self._current = part
        try:
            if pull.error is None:
                if self._link is not None and self._has_left():  # it may have restarted
                    with self._lock:
                        self._drop()
                        self._link = self._pipe = None
                self._receive(part, stream)
        except Exception as e:
            with self._lock:
                self._drop()
                self._link = self._pipe = None
            pull.fail(e)
        finally:
            with self._lock:
                self._current = None
            pull.end_receiving(part)

    def connected(self, deadline: Deadline, *, retry: bool = False) -> tuple[PeerLink, Pipe]:
        """Return its link and pipe; connect if needed. ``retry``: wait for a producer that is not up.

        Raises what a handshake raises, and PeerGoneError: another engine answers at the address.
        """
        with self._lock:
            link, pipe = self._link, self._pipe
        self._check_open()
        if link is not None and pipe is not None and not pipe.closed:
            return link, pipe
        context = self._context
        link = context.peers.connect(
            self._rank, PULL, timeout=deadline.remaining(), retry=retry, peer=self.peer
        )
        try:
            remote = link.agreement.remote
            if self._engine_id and remote.engine_id != self._engine_id:
                raise PeerGoneError(f"{remote.engine_id} answers at the address of {self._engine_id}")
            if remote.device.partition(":")[0] != self._views.device.type:
                raise HandshakeError(
                    f"device: ours {self._views.device.type}, theirs {remote.device}; connector 'p2p'"
                    " pulls KV only between caches on the same kind of device",
                    peer=str(remote.identity),
                )
            with self._lock:
                self._link = link
            pipe = link.open_pipe(PIPE, device=context.config.device, timeout=deadline.remaining())
            with self._lock:
                self._pipe = pipe
            self._check_open()
            self.route = link.agreement.transports[self._views.device.type].chosen
            return link, pipe
        except BaseException:
            link.close()
            raise

    def _check_open(self) -> None:
        with self._lock:
            if self._closed:
                self._drop()
                raise ClosedError("the connector was shut down")

    def _receive(self, part: Part, stream: OwnStream) -> None:
        pull, plan, heads = part.pull, part.pull.plan, part.heads
        stall_s, is_host = self._context.options.stall_timeout_s, self._views.device.type == "cpu"
        left = pull.deadline.remaining()
        link, pipe = self.connected(Deadline.after(stall_s if left is None else min(stall_s, left)))
        messages = self._messages(self._units_of(plan))
        unit = unit_of(self._context.cache.groups[0].block_size, plan.block_size)

        def ask(message: _Message) -> None:
            asked = {
                "claim": plan.claim,
                "unit": unit,
                "heads": (heads.theirs, heads.count),
                "units": [theirs for theirs, _ in message],
            }
            link.channel.send(asked, timeout=stall_s)

        if messages:
            ask(messages[0])
        for number, message in enumerate(messages, 1):
            answer = _answer_to(plan, link.channel.recv(timeout=stall_s))
            if not pull.begin_receiving(part):
                raise ClosedError(f"request {plan.request_id!r:.100} ended")
            found = [
                self._views.of(group, unit, heads.ours, heads.count, ours)
                for group, (_, ours) in enumerate(message)
                if ours
            ]
            checksum = link.agreement.checksum if is_host else None
            hashes = _hashes_in(answer, found) if checksum else [(1, list[bytes]())] * len(found)
            is_last = number == len(messages)
            if not is_last:  # so that the producer sends its messages without a pause
                ask(messages[number])
            with stream.after(pull.after):
                for (views, rows), of_rows in zip(found, hashes, strict=True):
                    layers = _Layers(views, rows, checksum, of_rows)
                    if is_last and len(plan.ours) == 1:
                        # Not the last layer: it ends the pull, whose figures must be complete by then.
                        layers.on_good = lambda layer: pull.arrived(part, min(layer + 1, pull.num_layers - 1))
                    on_layer = layers.arrived if is_host else None
                    pipe.recv_blocks(views, rows, on_layer=on_layer, timeout=stall_s)
                    pull.nbytes += views.rows.row_bytes * len(rows) * len(views)
                    pull.verify_seconds += layers.verify_seconds
                    if is_host and layers.num_verified < len(views):
                        raise IntegrityError(
                            f"KV of request {plan.request_id!r:.100} was corrupted in transit"
                        )
                DeviceMark(self._views.device).wait()
        pull.arrived(part, sum(map(self._views.num_layers, range(len(plan.ours)))))

    def _units_of(self, plan: PullPlan) -> _Message:
        """For each group, the producer's units and ours that have a block here.

        Raises:
            LayoutError: the producer has freed a block that is needed here.
        """
        found = []
        for group, theirs, ours in zip(self._context.cache.groups, plan.theirs, plan.ours, strict=True):
            size = group.block_size
            unit = unit_of(size, plan.block_size)
            pairs = zip(
                units(theirs, plan.block_size, unit, plan.start, plan.end),
                units(ours, size, unit, plan.start, plan.end),
                strict=True,
            )
            both = [(their, our) for their, our in pairs if our != NO_BLOCK]
            if any(their == NO_BLOCK for their, _ in both):
                raise LayoutError(
                    f"the producer has freed blocks of request {plan.request_id!r:.100} that this engine"
                    " needs"
                )
            found.append(([their for their, _ in both], [our for _, our in both]))
        return found

    def _messages(self, wanted: _Message) -> list[_Message]:
        """Split the units into messages of about 64 MiB at most, with at least one unit per group."""
        unit_bytes = max(1, sum(self._views.row_bytes(group) for group in range(len(wanted))))
        unit = self._context.cache.groups[0].block_size
        count = max(1, MAX_MESSAGE_BYTES // (unit_bytes * unit))
        longest = max((len(theirs) for theirs, _ in wanted), default=0)
        return [
            [(theirs[at : at + count], ours[at : at + count]) for theirs, ours in wanted]
            for at in range(0, longest, count)
        ]


class _Layers:
    """Verifies the layers of a message as they arrive."""

    def __init__(
        self, views: BlockViews, rows: Sequence[int], checksum: str | None, hashes: tuple[int, list[bytes]]
    ) -> None:
        self._views, self._rows, self._checksum = views, rows, checksum
        self._first, self._hashes = hashes
        self.on_good: Callable[[int], None] = lambda layer: None
        """Called with each layer, until one is wrong."""
        self.num_verified = 0
        """Layers before the first one that is wrong or was not verified."""
        self.verify_seconds = 0.0

    def arrived(self, layer: int) -> None:
        if self.num_verified < layer:
            return
        if self._checksum is not None:
            begun = time.perf_counter()
            found = hash_rows(self._checksum, self._views, layer, self._rows, self._first)
            is_right = hash_of(self._checksum, found.values()) == self._hashes[layer]
            self.verify_seconds += time.perf_counter() - begun
            if not is_right:
                return
        self.num_verified = layer + 1
        self.on_good(layer)


def _answer_to(plan: PullPlan, answer: Any) -> Mapping[str, Any]:
    """Return the producer's answer to a pull.

    Raises:
        EntryGoneError: the producer no longer keeps the blocks.
        WireError: the answer is malformed.
    """
    match answer:
        case {"sending": True}:
            return answer  # type: ignore[no-any-return]
        case {"refused": str()}:
            raise EntryGoneError(
                f"the producer no longer keeps the blocks of request {plan.request_id!r:.100}"
            )
    raise WireError("the producer sent a malformed answer to a pull")


def _hashes_in(
    answer: Mapping[str, Any], found: Sequence[tuple[BlockViews, list[int]]]
) -> list[tuple[int, list[bytes]]]:
    """For each message, how many rows the first hash covers, and the hashes of its layers.

    Raises:
        WireError: the answer has no such hashes.
    """
    hashes = answer.get("hashes")
    if type(hashes) is not list or len(hashes) != len(found):
        raise WireError("the producer sent KV without hashes")
    for each, (views, _) in zip(hashes, found, strict=True):
        match each:
            case (int(first), [*layers]) if 0 < first <= HASHED_TOGETHER and len(layers) == len(views):
                pass
            case _:
                raise WireError("the producer sent malformed hashes")
    return hashes
