"""Entries on their way through the data pipe: whose turn it is, receiving them, draining what nobody wants.

Entries come on the data pipe in the order in which they were announced. One whose caller gave up in the
middle is received and dropped, up to its last tensor or the ``None`` that cuts it short, by a thread of
its own; only then is it the next entry's turn. So nothing that was given up can be taken for the next
entry.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from kvplug import ClosedError, KvplugError, TimeoutError
from kvplug.transport import (
    BackgroundThread,
    Deadline,
    Entry,
    EntrySink,
    Pipe,
    TensorMismatchError,
    WireError,
)
from kvplug_lookup.messages import Coming, PartMeta


@attrs.define(eq=False)
class Delivery:
    """An announced entry whose tensors are on the data pipe."""

    coming: Coming
    num_left: int
    half: Tensor | None = None
    """The memory into which a tensor was being received when the time was over."""


class CutShortError(Exception):
    """The store stopped sending an entry."""


class Deliveries:
    """The data pipe, and the entries announced on it.

    Args:
        lock: of the end that reaches the store; whoever is woken by it asks ``check``.
        check: raises what every call raises once that end has ended.
        lose: ends it, because the data pipe cannot be trusted any more.
    """

    def __init__(
        self,
        data: Pipe,
        device: torch.device,
        *,
        lock: threading.Lock,
        check: Callable[[], None],
        lose: Callable[[KvplugError], None],
    ) -> None:
        self._data = data
        self._device = device
        self._lock = lock
        self._turn = threading.Condition(lock)
        self._check = check
        self._lose = lose
        self._queue: deque[Delivery] = deque()
        """In the order of the data pipe; the first one's tensors come next."""
        self._scratch: dict[str, Tensor] = {}
        """Receive memory for one layer of key and value, used again and again by whose turn it is."""

    def announce(self, coming: Coming) -> Delivery:
        """Under the lock: an entry will come."""
        delivery = Delivery(coming, coming.num_tensors)
        self._queue.append(delivery)
        return delivery

    def end(self) -> None:
        """Under the lock: nothing comes any more."""
        self._scratch.clear()
        self._turn.notify_all()

    # -- receiving -----------------------------------------------------------------------------

    def receive(self, delivery: Delivery, sink: EntrySink | None, deadline: Deadline) -> Entry:
        """Receive an entry when it is its turn.

        Raises:
            TimeoutError: it, or one before it, is still coming.
            CutShortError: the store says elsewhere why.
            WireError: what came is not what was announced.
        """
        with self._lock:
            while self._queue[0] is not delivery:
                self._check()
                if deadline.expired:
                    raise TimeoutError("entries that were asked for before this one are still coming")
                self._turn.wait(deadline.remaining())
        coming = delivery.coming
        header = coming.header()
        whole_key = whole_value = None
        if sink is not None:
            sink.begin(header)
        else:
            whole_key = None if coming.key is None else coming.key.empty(self._device)
            whole_value = None if coming.value is None else coming.value.empty(self._device)
        for layer in range(coming.num_layers):
            parts: list[Tensor | None] = []
            for name, meta, whole in (("key", coming.key, whole_key), ("value", coming.value, whole_value)):
                if meta is None:
                    parts.append(None)
                    continue
                memory = self._layer_memory(name, meta) if whole is None else whole[layer]
                parts.append(self._next_tensor(delivery, memory, deadline))
            if sink is not None:
                sink.layer(layer, *parts)
        hidden = None
        if coming.hidden is not None:
            hidden = self._next_tensor(delivery, coming.hidden.empty(self._device), deadline)
        return Entry(
            header=header,
            tokens=header.tokens,
            roi=header.roi,
            key=whole_key,
            value=whole_value,
            hidden=hidden,
        )

    def _layer_memory(self, name: str, meta: PartMeta) -> Tensor:
        """Memory for one layer, as it was used for the layer before."""
        dtype, shape = meta.torch_dtype, meta.shape[1:]
        memory = self._scratch.get(name)
        if memory is None or memory.dtype is not dtype or memory.shape != shape:
            memory = self._scratch[name] = torch.empty(shape, dtype=dtype, device=self._device)
        return memory

    def _next_tensor(self, delivery: Delivery, out: Tensor, deadline: Deadline) -> Tensor:
        if deadline.expired:
            coming = delivery.coming
            raise TimeoutError(
                f"entry {coming.entry_id}: {delivery.num_left} of {coming.num_tensors} tensors"
                " did not come in time"
            )
        delivery.half = out
        try:
            received = self._data.recv_tensor(out, timeout=deadline.remaining())
        except TensorMismatchError:
            received = self._data.recv_tensor(timeout=deadline.remaining())
            if received is not None:
                error = WireError(
                    f"a tensor of another shape or dtype than announced came: {list(received.shape)} (from"
                    f" the lookup store at {self._data.peer})"
                )
                self._lose(error)
                raise error from None
        except TimeoutError:
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

    # -- leaving -------------------------------------------------------------------------------

    def leave(self, delivery: Delivery) -> None:
        """Its caller goes. What of it has not come yet is drained by another thread."""
        if delivery.num_left or self._queue[0] is not delivery:
            name = f"kvplug-lookup-drain-{delivery.coming.call}"
            BackgroundThread(self._drain, args=(delivery,), name=name, stop=self._abandon).start()
        else:
            self._end_turn(delivery)

    def _abandon(self) -> None:
        self._lose(ClosedError("the program leaves"))

    def _drain(self, delivery: Delivery) -> None:
        """Receive and drop what an abandoned entry's sender has sent, in its turn."""
        try:
            with self._lock:
                while self._queue[0] is not delivery:
                    self._check()
                    self._turn.wait()
                self._check()
            while delivery.num_left:
                out, delivery.half = delivery.half, None
                try:
                    received = self._data.recv_tensor(out, timeout=None)
                except TensorMismatchError:
                    received = self._data.recv_tensor(timeout=None)
                delivery.num_left = 0 if received is None else delivery.num_left - 1
        except KvplugError as e:
            self._lose(e)
        else:
            self._end_turn(delivery)

    def _end_turn(self, delivery: Delivery) -> None:
        with self._lock:
            if self._queue and self._queue[0] is delivery:
                self._queue.popleft()
                self._turn.notify_all()
