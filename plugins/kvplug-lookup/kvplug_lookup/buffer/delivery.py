"""Receives entries from the data pipe in order, and drains those that their callers gave up.

Entries arrive on the data pipe in the order of their announcements. If a caller gives up midway, the drainer
receives and drops the rest of the entry, up to its last tensor or the ``None`` that cuts it short, before the
next entry's turn. So tensors of an abandoned entry are never taken for the next entry. The drainer is a
thread that runs only while there are such entries.

A tensor is received only into memory of the announced shape, whose size is first compared with the memory
that this process can have. The data pipe itself allocates nothing.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from kvplug import (
    CapacityError,
    ClosedError,
    KvplugError,
    ResourceExhaustedError,
    TimeoutError,
    TransportError,
)
from kvplug.net.wire import TensorMeta
from kvplug.net.wire.tensors import dtype_of
from kvplug.transport import (
    BackgroundThread,
    Deadline,
    Entry,
    LookupBuffer,
    MessageLimit,
    NamedExhaustion,
    Pipe,
    TensorMismatchError,
    WireError,
)
from kvplug_lookup.buffer.messages import Coming

_log = logging.getLogger(__name__)

_LACKING_S = 0.1
"""The pause before another attempt to receive a tensor that there was no memory for."""


@attrs.define(eq=False)
class Delivery:
    """An announced entry whose tensors are on the data pipe."""

    coming: Coming
    num_left: int
    half: Tensor | None = None
    """The memory of a tensor that was being received at the timeout."""
    is_forsaken: bool = False
    """Its caller gave up: the drainer receives the rest."""

    @property
    def next_tensor(self) -> tuple[str, TensorMeta]:
        """Name and meta of the next tensor."""
        return self.coming.tensor(self.coming.num_tensors - self.num_left)


class CutShortError(Exception):
    """The store stopped sending an entry."""


class Deliveries:
    """The data pipe, and the entries announced on it.

    Args:
        max_bytes: the largest entry to allocate memory for; ``None``: what this process can have.
        lock: the reaching end's lock; a thread that it wakes calls ``check``.
        check: raises the reaching end's error once that end has ended.
        lose: ends the reaching end, since the data pipe can no longer be trusted.
    """

    def __init__(
        self,
        data: Pipe,
        device: torch.device,
        *,
        max_bytes: int | None,
        lock: threading.Lock,
        check: Callable[[], None],
        lose: Callable[[KvplugError], None],
    ) -> None:
        data.limit_messages(0)
        self._data = data
        self._device = device
        self._max_bytes = max_bytes
        self._lock = lock
        self._turn = threading.Condition(lock)
        self._check = check
        self._lose = lose
        self._queue: deque[Delivery] = deque()
        """In the order of the data pipe; the tensors of the first entry come next."""
        self._scratch: dict[str, Tensor] = {}
        """Memory to receive one layer of key and value, reused by each entry."""
        self._drains = False
        """The drainer is running."""

    def announce(self, coming: Coming) -> Delivery:
        """Note that an entry will arrive. Needs the lock."""
        delivery = Delivery(coming, coming.num_tensors)
        self._queue.append(delivery)
        return delivery

    def end(self) -> None:
        """Wake waiting callers: nothing more arrives. Needs the lock."""
        self._scratch.clear()
        self._turn.notify_all()

    # -- receiving -----------------------------------------------------------------------------

    def receive(self, delivery: Delivery, sink: LookupBuffer.Sink | None, deadline: Deadline) -> Entry:
        """Receive an entry when it is its turn.

        Raises:
            TimeoutError: the entry, or one before it, did not arrive in time.
            CutShortError: the store cut it short; it sends the reason on the signal pipe.
            CapacityError: there is no memory for it.
            WireError: the tensors are not the announced ones.
        """
        with self._lock:
            while self._queue[0] is not delivery:
                self._check()
                if deadline.expired:
                    raise TimeoutError("entries of earlier calls are still arriving")
                self._turn.wait(deadline.remaining())
        coming = delivery.coming
        header = coming.header()
        whole_key = whole_value = None
        if sink is not None:
            sink.begin(header)
        else:
            MessageLimit(self._max_bytes).check_size(coming.nbytes, f"entry {coming.entry_id}")
            whole_key = None if coming.key is None else self._memory(coming.key)
            whole_value = None if coming.value is None else self._memory(coming.value)
        for layer in range(coming.num_layers):
            parts: list[Tensor | None] = []
            for meta, whole in ((coming.key, whole_key), (coming.value, whole_value)):
                if meta is None:
                    parts.append(None)
                    continue
                memory = self._layer_memory(delivery) if whole is None else whole[layer]
                parts.append(self._next_tensor(delivery, memory, deadline))
            if sink is not None:
                sink.layer(layer, *parts)
        hidden = None
        if coming.hidden is not None:
            hidden = self._next_tensor(delivery, self._memory(coming.hidden), deadline)
        return Entry(
            header=header,
            tokens=header.tokens,
            roi=header.roi,
            key=whole_key,
            value=whole_value,
            hidden=hidden,
        )

    def _layer_memory(self, delivery: Delivery) -> Tensor:
        """Memory for the next tensor of a layer, reused from the layer before."""
        name, meta = delivery.next_tensor
        memory = self._scratch.get(name)
        if memory is None or memory.dtype is not dtype_of(meta.dtype) or memory.shape != meta.shape:
            memory = self._scratch[name] = self._memory(meta)
        return memory

    def _memory(self, meta: TensorMeta) -> Tensor:
        """New memory.

        Raises:
            CapacityError, ResourceExhaustedError: there is not enough memory.
            UnsupportedError: this torch does not have the dtype.
        """
        dtype = dtype_of(meta.dtype)
        MessageLimit(self._max_bytes).check_size(meta.nbytes, "a tensor of an entry")
        what = f"no memory for a tensor of an entry ({meta.nbytes} bytes)"
        with NamedExhaustion(what, CapacityError, (RuntimeError, MemoryError)):
            # As bytes: torch may fill new tensors, and does not have kernels for every dtype.
            flat = torch.empty(meta.nbytes, dtype=torch.uint8, device=self._device)
        return flat.view(dtype).view(meta.shape)

    def _next_tensor(self, delivery: Delivery, out: Tensor, deadline: Deadline) -> Tensor:
        if deadline.expired:
            coming = delivery.coming
            raise TimeoutError(
                f"entry {coming.entry_id}: {delivery.num_left} of {coming.num_tensors} tensors"
                " did not arrive in time"
            )
        delivery.half = out
        try:
            received = self._data.recv_tensor(out, timeout=deadline.remaining())
        except TensorMismatchError:
            self._expect_none(deadline)
            received = None
        except (TimeoutError, ResourceExhaustedError):
            raise
        except KvplugError as e:
            self._lose(e)
            self._check()
        delivery.half = None
        if received is None:
            delivery.num_left = 0
            raise CutShortError
        delivery.num_left -= 1
        return received

    def _expect_none(self, deadline: Deadline) -> None:
        """Receive the ``None`` that cuts an entry short, after a mismatch with the announced tensor.

        Raises:
            WireError: another tensor arrived.
        """
        try:
            received = self._data.recv_tensor(timeout=deadline.remaining())
        except CapacityError as e:
            received_as = str(e)
        else:
            if received is None:
                return
            received_as = f"{received.dtype} of shape {list(received.shape)}"
        error = WireError(
            f"the lookup store at {self._data.peer} sent a tensor of another shape or dtype than announced:"
            f" {received_as}"
        )
        self._lose(error)
        raise error

    # -- leaving -------------------------------------------------------------------------------

    def leave(self, delivery: Delivery) -> None:
        """End the caller's use of an entry. Another thread drains what has not arrived.

        Raises:
            ResourceExhaustedError: the thread cannot be started, so this end is lost.
        """
        with self._lock:
            if delivery.num_left or self._queue[0] is not delivery:
                delivery.is_forsaken = True
                begins = not self._drains
                self._drains = True
            else:
                begins = False
                self._end_turn()
            self._turn.notify_all()
        if begins:
            try:
                BackgroundThread(self._drain, name="kvplug-lookup-drain", stop=self._abandon).start()
            except RuntimeError as e:  # otherwise the next entry would wait for ever
                shortage = NamedExhaustion.of(e, "draining an abandoned entry")
                self._lose(TransportError(f"could not drain an abandoned entry: {shortage or e}"))
                if shortage is not None:  # for this call; later calls raise that the end is lost
                    raise shortage from e

    def _abandon(self) -> None:
        self._lose(ClosedError("the program exits"))

    def _drain(self) -> None:
        """Receive and drop the rest of abandoned entries, each in its turn."""
        try:
            while (delivery := self._forsaken()) is not None:
                while delivery.num_left:
                    try:
                        memory = self._layer_memory(delivery) if delivery.half is None else delivery.half
                        self._next_tensor(delivery, memory, _NEVER)
                    except CutShortError:
                        pass
                    except ResourceExhaustedError as e:
                        _log.warning("draining an abandoned entry is delayed: %s", e)
                        with self._lock:
                            self._turn.wait(_LACKING_S)
                            self._check()
        except KvplugError as e:
            self._lose(e)

    def _forsaken(self) -> Delivery | None:
        """Wait for the next abandoned entry's turn; ``None``: none is left, and this thread ends."""
        with self._lock:
            if self._queue and self._queue[0].is_forsaken and not self._queue[0].num_left:
                self._end_turn()
            while any(delivery.is_forsaken for delivery in self._queue):
                self._check()
                if self._queue[0].is_forsaken:
                    return self._queue[0]
                self._turn.wait()
            self._drains = False
            return None

    def _end_turn(self) -> None:
        """Needs the lock."""
        self._queue.popleft()
        self._turn.notify_all()


_NEVER = Deadline.after(None)
