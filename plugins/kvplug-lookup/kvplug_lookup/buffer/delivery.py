"""Entries on their way through the data pipe: their order, receiving and draining them.

Entries come on the data pipe in the order in which they were announced. One whose caller gave up in the
middle is received and dropped, up to its last tensor or the ``None`` that cuts it short, by the drainer, a
thread that lives while there is such an entry; only then is it the next entry's turn. So nothing that was
given up can be taken for the next entry.

A tensor is received only into memory of the announced shape, which is compared with what this process can
have before it is asked for. On the data pipe itself nothing is allocated.
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
"""The pause before another try to receive what there was no memory for."""


@attrs.define(eq=False)
class Delivery:
    """An announced entry whose tensors are on the data pipe."""

    coming: Coming
    num_left: int
    half: Tensor | None = None
    """The memory into which a tensor was being received when the time was over."""
    is_forsaken: bool = False
    """Its caller has gone: the drainer receives what is left."""

    @property
    def next_tensor(self) -> tuple[str, TensorMeta]:
        """Name and meta of the tensor that comes next."""
        return self.coming.tensor(self.coming.num_tensors - self.num_left)


class CutShortError(Exception):
    """The store stopped sending an entry."""


class Deliveries:
    """The data pipe, and the entries announced on it.

    Args:
        max_bytes: the largest entry to take memory for; ``None``: what this process can have.
        lock: of the end that reaches the store; a thread that it wakes calls ``check``.
        check: raises what every call raises once that end has ended.
        lose: ends it, because the data pipe cannot be trusted any more.
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
        """In the order of the data pipe; the first one's tensors come next."""
        self._scratch: dict[str, Tensor] = {}
        """Receive memory for one layer of key and value, used again for each entry in its turn."""
        self._drains = False
        """The drainer is alive."""

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

    def receive(self, delivery: Delivery, sink: LookupBuffer.Sink | None, deadline: Deadline) -> Entry:
        """Receive an entry when it is its turn.

        Raises:
            TimeoutError: it, or one before it, is still coming.
            CutShortError: the store says elsewhere why.
            CapacityError: there is no memory for it.
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
        """Memory for the next tensor of a layer, as it was used for the layer before."""
        name, meta = delivery.next_tensor
        memory = self._scratch.get(name)
        if memory is None or memory.dtype is not dtype_of(meta.dtype) or memory.shape != meta.shape:
            memory = self._scratch[name] = self._memory(meta)
        return memory

    def _memory(self, meta: TensorMeta) -> Tensor:
        """New memory.

        Raises:
            CapacityError, ResourceExhaustedError: there is not so much.
            UnsupportedError: this torch has no such dtype.
        """
        dtype = dtype_of(meta.dtype)
        MessageLimit(self._max_bytes).check_size(meta.nbytes, "a tensor of an entry")
        what = f"no memory for a tensor of {meta.nbytes} bytes of an entry"
        with NamedExhaustion(what, CapacityError, (RuntimeError, MemoryError)):
            # From bytes: torch may have to fill what it makes, and has no kernels for every dtype.
            flat = torch.empty(meta.nbytes, dtype=torch.uint8, device=self._device)
        return flat.view(dtype).view(meta.shape)

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
        """What comes next is not the announced tensor: it may only be the ``None`` that cuts an entry short.

        Raises:
            WireError: it is another tensor.
        """
        try:
            received = self._data.recv_tensor(timeout=deadline.remaining())
        except CapacityError as e:
            what = str(e)
        else:
            if received is None:
                return
            what = f"{received.dtype} of shape {list(received.shape)}"
        error = WireError(
            f"a tensor of another shape or dtype than announced came from the lookup store at"
            f" {self._data.peer}: {what}"
        )
        self._lose(error)
        raise error

    # -- leaving -------------------------------------------------------------------------------

    def leave(self, delivery: Delivery) -> None:
        """Its caller goes. What of it has not come yet is drained by another thread.

        Raises:
            ResourceExhaustedError: there can be none, so that this end is lost.
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
            except RuntimeError as e:  # or the next entry would wait for ever
                shortage = NamedExhaustion.of(e, "receiving the rest of an entry that was given up")
                self._lose(TransportError(f"the rest of an entry could not be received: {shortage or e}"))
                if shortage is not None:  # of this call; later ones hear that the end is lost
                    raise shortage from e

    def _abandon(self) -> None:
        self._lose(ClosedError("the program leaves"))

    def _drain(self) -> None:
        """Receive and drop what the senders of abandoned entries have sent, each in its turn."""
        try:
            while (delivery := self._forsaken()) is not None:
                while delivery.num_left:
                    try:
                        memory = self._layer_memory(delivery) if delivery.half is None else delivery.half
                        self._next_tensor(delivery, memory, _NEVER)
                    except CutShortError:
                        pass
                    except ResourceExhaustedError as e:
                        _log.warning("an entry that was given up is received later: %s", e)
                        with self._lock:
                            self._turn.wait(_LACKING_S)
                            self._check()
        except KvplugError as e:
            self._lose(e)

    def _forsaken(self) -> Delivery | None:
        """The next abandoned entry, in its turn; ``None``: there is none left, and this thread ends."""
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
        """Under the lock."""
        self._queue.popleft()
        self._turn.notify_all()


_NEVER = Deadline.after(None)
