"""The end that reaches a store over a signal pipe and a data pipe.

One thread listens to the signal pipe and hands each answer to its call. The calling thread receives the
entry's tensors itself, so a sink runs there and its error reaches the caller.

One call at a time receives. It has memory for all tensors before it asks the store to send them, so what it
refuses is never sent, and the data pipe itself allocates nothing. A call that gives up midway (a timeout, or
a sink that raised) sends ``Cancel``, so that the entry is back at once. A thread then receives and drops the
rest of its tensors, up to the last or the ``None`` that cuts them short, before the next call receives. So
tensors of an abandoned entry are never taken for the next entry.

A store that has proved its identity may still be faulty or malicious, so its answers are compared with the
requests. An answer that no call waits for, an entry of other tokens, or a match longer than the query ends
the connection.
"""

from __future__ import annotations

import copy
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

import attrs
import torch
from torch import Tensor

from kvplug import (
    CapacityError,
    ClosedError,
    KvplugError,
    PeerGoneError,
    ResourceExhaustedError,
    TimeoutError,
    TransportError,
    UnsupportedError,
)
from kvplug.net.wire import TensorMeta
from kvplug.net.wire.tensors import dtype_of
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    BackgroundThread,
    Deadline,
    Entry,
    ExitGuard,
    LookupBuffer,
    MessageLimit,
    NamedExhaustion,
    Pipe,
    TensorMismatchError,
    Timeout,
    WireError,
    close_after_fork,
)
from kvplug_lookup.buffer import messages
from kvplug_lookup.buffer.entry import Description, Query, entry_of, layers_of, tensors_of
from kvplug_lookup.buffer.messages import PipePair

_log = logging.getLogger(__name__)

_CANCEL_TIMEOUT_S = 1.0
"""How long to wait for room on the signal pipe for the few bytes of a ``Cancel``."""

_SETTLE_S = 1.0
"""How far ``drop_select`` may pass its timeout once the whole entry has arrived: twice if the store is
silent."""

_LACKING_S = 0.1
"""The pause before another attempt to drop a tensor that could not be received."""

_NEVER = Deadline.after(None)


@attrs.define(eq=False)
class _Call:
    number: int
    answered: set[type[messages.Answer]] = attrs.field(factory=set)
    """Kinds of answers that have arrived, each once."""
    answers: queue.SimpleQueue[messages.Answer | None] = attrs.field(factory=queue.SimpleQueue)
    """``None``: this end has ended."""


def _later(deadline: Deadline) -> Deadline:
    return Deadline(max(deadline.at, Deadline.after(_SETTLE_S).at))


_Kind = TypeVar("_Kind", bound=messages.Answer)
_Memory = tuple[Sequence[Tensor] | Tensor | None, Sequence[Tensor] | Tensor | None, Tensor | None]


class _CutShortError(Exception):
    """The store stopped sending an entry."""


class ReachingEnd(LookupBuffer):
    """Thread-safe. Calls may overtake each other; entries arrive one by one.

    ``insert`` is not supported: entries are stored where they are computed.
    """

    def __init__(
        self,
        signal: Pipe,
        data: Pipe,
        *,
        device: str = "cpu",
        timeout_s: float = 30.0,
        max_message_bytes: int | None = None,
    ) -> None:
        self._pipes = PipePair(signal, data)
        self._device = torch.device(device)
        self._timeout_s = timeout_s
        self._limit = MessageLimit(max_message_bytes)
        self._lock = threading.Lock()
        self._last_number = 0
        self._calls: dict[int, _Call] = {}
        self._turn = threading.Condition(self._lock)
        self._is_receiving = False
        """A call, or the thread that drops what a call left, uses the data pipe."""
        self._ended: KvplugError | None = None
        """The error that every call raises from now on."""
        self._closed = False
        close_after_fork(self)
        ExitGuard.register(self)
        self._listener = BackgroundThread(self._listen, name="kvplug-lookup-reach", stop=self.abort)
        try:
            with NamedExhaustion("reaching a lookup store"):
                self._listener.start()
        except BaseException:
            self._pipes.abort()  # or the store would serve this end for ever
            raise

    @property
    def is_lost(self) -> bool:
        return self._ended is not None

    # -- the buffer ----------------------------------------------------------------------------

    def insert(self, *args: Any, **kwargs: Any) -> int:
        self._check()
        raise UnsupportedError(
            "this end of the lookup buffer cannot insert: insert entries at the end that holds the store,"
            " where they are computed"
        )

    def match(self, input_tokens: Any, roi: Any = None, *, extra: bytes = b"") -> int:
        deadline = Deadline.after(self._timeout_s)
        query = Query.of(input_tokens, roi, extra)
        call = self._open()
        try:
            self._send(messages.Match(call.number, query), deadline)
            answer = self._answer(call, messages.Matched, deadline, "a match")
        finally:
            self._leave(call)
        if answer.num_tokens > query.num_tokens:
            self._break(f"got a match of {answer.num_tokens} tokens for {query}")
        return answer.num_tokens

    def drop_select(
        self,
        input_tokens: Any,
        roi: Any = None,
        *,
        extra: bytes = b"",
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Entry:
        return self._find(Query.of(input_tokens, roi, extra), None, timeout)

    def select(
        self,
        input_tokens: Any,
        roi: Any = None,
        *,
        extra: bytes = b"",
        min_tokens: int = 1,
        sink: LookupBuffer.Sink | None = None,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Entry:
        return self._find(Query.of(input_tokens, roi, extra, max(1, min_tokens)), sink, timeout)

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        deadline = Deadline.after(timeout, self._timeout_s)
        if not self._end(ClosedError("this end of the lookup buffer is closed"), closed=True):
            return
        self._pipes.close(deadline)
        if threading.current_thread() is not self._listener:
            self._listener.join(deadline.remaining())

    def abort(self) -> None:
        self._end(ClosedError("this end of the lookup buffer was aborted"), closed=True)
        self._pipes.abort()

    # -- calls ---------------------------------------------------------------------------------

    def _open(self) -> _Call:
        with self._lock:
            self._check()
            self._last_number += 1
            call = self._calls[self._last_number] = _Call(self._last_number)
            return call

    def _leave(self, call: _Call, *, cancel: bool = False) -> None:
        with self._lock:
            del self._calls[call.number]
        if cancel and self._ended is None:
            try:
                self._pipes.send(messages.Cancel(call.number), Deadline.after(_CANCEL_TIMEOUT_S))
            except KvplugError as e:
                self._lose(e)

    def _send(self, message: messages.Message, deadline: Deadline) -> None:
        try:
            self._pipes.send(message, deadline)
        except (TimeoutError, UnsupportedError, CapacityError, ResourceExhaustedError):
            raise  # nothing was sent
        except KvplugError as e:
            self._lose(e)
            self._check()

    def _answer(self, call: _Call, kind: type[_Kind], deadline: Deadline, what: str) -> _Kind:
        """The next answer to a call, which must be of this kind.

        Raises:
            TimeoutError: no answer arrived.
            KvplugError: the store reports that the call failed, or this end has ended.
        """
        try:
            answer = call.answers.get(timeout=deadline.remaining())
        except queue.Empty:
            self._check()
            raise TimeoutError(f"{what}: no answer from the store at {self._pipes.peer} in time") from None
        if answer is None:
            self._check()
        if isinstance(answer, messages.Failed):
            raise answer.to_error(what, self._pipes.peer)
        if not isinstance(answer, kind):
            self._break(f"{what}: got {type(answer).__name__} instead of {kind.__name__}")
        return answer

    # -- entries -------------------------------------------------------------------------------

    def _find(self, query: Query, sink: LookupBuffer.Sink | None, timeout: Timeout) -> Entry:
        """Ask for an entry, and receive it."""
        deadline = Deadline.after(timeout, self._timeout_s)
        takes = not query.min_tokens
        call, ended = self._open(), False
        try:
            self._send(messages.Find(call.number, query, deadline.remaining()), deadline)
            entry = self._fetch(call, query, sink, deadline)
            self._send(messages.Done(call.number), _later(deadline) if takes else deadline)
            ended = True
            if takes and not self._granted(call, deadline).is_yours:
                raise TimeoutError("the entry did not arrive in time; it is back in the store")
            return entry
        finally:
            self._leave(call, cancel=not ended)

    def _granted(self, call: _Call, deadline: Deadline) -> messages.Granted:
        """Wait until the store grants a taken entry, which is complete, to this call, or to no call.

        Leaving earlier could lose the entry for everyone, so wait a little longer for the answer, which the
        store sends at once. A wait may also end because this process was stopped: then wait once more.
        """
        what = "the grant of an entry"
        try:
            return self._answer(call, messages.Granted, _later(deadline), what)
        except TimeoutError:
            return self._answer(call, messages.Granted, Deadline.after(_SETTLE_S), what)

    def _fetch(self, call: _Call, query: Query, sink: LookupBuffer.Sink | None, deadline: Deadline) -> Entry:
        """Receive the entry that answers a call."""
        found = self._answer(call, messages.Found, deadline, str(query))
        entry = found.entry
        if not query.is_met_by(entry.ids(), entry.extra):
            self._break(f"{query}: got entry {found.entry_id}, which has other tokens")
        try:
            header = entry.header(found.entry_id)
        except WireError as e:
            self._break(f"entry {found.entry_id} has wrong metadata: {e}")
        if sink is not None:
            sink.begin(header)
        self._begin_turn(deadline)
        coming: deque[Tensor] = deque()
        try:
            memory = self._memory_for(entry, whole=sink is None)
            coming.extend(tensors_of(*memory))
            self._ask_for_tensors(call, coming, deadline)
            for index, layer in enumerate(layers_of(*memory[:2])):
                for _ in range(len(layer) - layer.count(None)):
                    self._receive_next(coming, deadline)
                if sink is not None:
                    sink.layer(index, *layer)
            while coming:
                self._receive_next(coming, deadline)
        except _CutShortError:
            self._answer(call, messages.Failed, deadline, f"the rest of the entry for {query}")
            raise  # not reached: it raises the reason
        finally:
            self._end_turn(coming)
        return entry_of(header, *memory) if sink is None else entry_of(header, hidden=memory[2])

    def _begin_turn(self, deadline: Deadline) -> None:
        """Wait until no other call uses the data pipe."""
        with self._lock:
            while self._is_receiving and self._ended is None:
                if deadline.expired:
                    raise TimeoutError("entries of earlier calls are still arriving")
                self._turn.wait(deadline.remaining())
            self._check()
            self._is_receiving = True

    def _end_turn(self, coming: deque[Tensor]) -> None:
        """Let the next call receive, once the tensors that are still coming have arrived.

        Raises:
            ResourceExhaustedError: the thread that receives them cannot be started, so this end is lost.
        """
        if coming and self._ended is None:
            rest = BackgroundThread(
                self._drop_rest, args=(coming,), name="kvplug-lookup-drop", stop=self.abort
            )
            try:
                rest.start()
                return
            except RuntimeError as e:  # otherwise the next entry would wait for ever
                shortage = NamedExhaustion.of(e, "dropping the rest of an entry")
                self._lose(TransportError(f"could not drop the rest of an entry: {shortage or e}"))
                if shortage is not None:  # for this call; later calls raise that the end is lost
                    raise shortage from e
        with self._lock:
            self._is_receiving = False
            self._turn.notify_all()

    def _drop_rest(self, coming: deque[Tensor]) -> None:
        try:
            while coming:
                try:
                    self._receive_next(coming, _NEVER)
                except ResourceExhaustedError as e:
                    _log.warning("dropping the rest of an entry is delayed: %s", e)
                    time.sleep(_LACKING_S)
        except _CutShortError:
            pass
        except KvplugError as e:
            self._lose(e)
        coming.clear()
        self._end_turn(coming)

    def _memory_for(self, entry: Description, *, whole: bool) -> _Memory:
        """Memory for the key, the value and the hidden states of an entry: all of them, or one layer again
        and again.

        Raises:
            CapacityError, ResourceExhaustedError: there is not enough memory.
            UnsupportedError: this torch does not have a dtype.
        """
        metas = [entry.key, entry.value, entry.hidden]
        if not whole:
            metas[:2] = (meta and TensorMeta(meta.dtype, meta.shape[1:]) for meta in metas[:2])
        self._limit.check_size(sum(meta.nbytes for meta in metas if meta is not None), "an entry")
        key, value, hidden = (meta and self._empty(meta) for meta in metas)
        if whole:
            return key, value, hidden
        layers = entry.num_layers
        return key if key is None else [key] * layers, value if value is None else [value] * layers, hidden

    def _empty(self, meta: TensorMeta) -> Tensor:
        dtype = dtype_of(meta.dtype)
        what = f"no memory for a tensor of an entry ({meta.nbytes} bytes)"
        with NamedExhaustion(what, CapacityError, (RuntimeError, MemoryError)):
            # As bytes: torch may fill new tensors, and does not have kernels for every dtype.
            flat = torch.empty(meta.nbytes, dtype=torch.uint8, device=self._device)
        return flat.view(dtype).view(meta.shape)

    def _ask_for_tensors(self, call: _Call, coming: deque[Tensor], deadline: Deadline) -> None:
        if not coming:
            return
        try:
            self._send(messages.Send(call.number), deadline)
        except KvplugError:
            coming.clear()  # nothing was sent, or this end is lost
            raise
        except BaseException as e:  # it is unknown whether the store will send
            self._lose_interrupted(e)
            raise

    def _receive_next(self, coming: deque[Tensor], deadline: Deadline) -> None:
        """Receive the next tensor into the first of ``coming``, and remove it there.

        Raises:
            TimeoutError: it did not arrive in time.
            _CutShortError: the store cut the entry short; it sends the reason on the signal pipe.
            WireError: the tensor is not the announced one.
        """
        if deadline.expired:
            raise TimeoutError(f"{len(coming)} tensors of an entry did not arrive in time")
        try:
            self._pipes.data.recv_tensor(coming[0], timeout=deadline.remaining())
        except TensorMismatchError:
            self._expect_none(deadline)
            coming.clear()
            raise _CutShortError from None
        except (TimeoutError, ResourceExhaustedError):
            raise
        except KvplugError as e:
            self._lose(e)
            self._check()
        except BaseException as e:  # it is unknown whether the tensor was received
            self._lose_interrupted(e)
            raise
        coming.popleft()

    def _expect_none(self, deadline: Deadline) -> None:
        """Receive the ``None`` that cuts an entry short, after a mismatch with the announced tensor.

        Raises:
            WireError: another tensor arrived.
        """
        try:
            received = self._pipes.data.recv_tensor(timeout=deadline.remaining())
        except CapacityError as e:
            received_as = str(e)
        else:
            if received is None:
                return
            received_as = f"{received.dtype} of shape {list(received.shape)}"
        self._break(f"got a tensor of another shape or dtype than announced: {received_as}")

    # -- the thread that listens ---------------------------------------------------------------

    def _listen(self) -> None:
        try:
            while True:
                message = self._pipes.receive(_NEVER)
                if isinstance(message, messages.End):
                    self._lose(PeerGoneError(f"the lookup store at {self._pipes.peer} has closed"))
                    return
                self._take_answer(message)
        except KvplugError as e:
            self._lose(e)
        except Exception as e:
            _log.exception("the thread for answers of the lookup store at %s failed", self._pipes.peer)
            self._lose(TransportError(f"a lookup buffer's thread failed: {type(e).__name__}: {e}"))

    def _take_answer(self, message: messages.Message) -> None:
        if not isinstance(message, messages.Matched | messages.Found | messages.Granted | messages.Failed):
            raise WireError(f"a store must not send {type(message).__name__}")
        with self._lock:
            if message.call > self._last_number:
                raise WireError(f"got a {type(message).__name__} that was not asked for")
            call = self._calls.get(message.call)
            if call is None:
                return  # its caller has given up
            if type(message) in call.answered:
                raise WireError(f"got a second {type(message).__name__} for one call")
            call.answered.add(type(message))
            call.answers.put(message)

    # -- ending --------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._ended is not None:
            # A copy for each caller: an error that is raised repeatedly collects all their stacks.
            raise copy.copy(self._ended) from self._ended

    def _break(self, why: str) -> NoReturn:
        """End the connection: the store violates the protocol."""
        error = WireError(f"{why} (from the lookup store at {self._pipes.peer})")
        self._lose(error)
        raise error

    def _lose(self, error: KvplugError) -> None:
        """End the connection with ``error``."""
        if self._end(error):
            self._pipes.abort()

    def _lose_interrupted(self, error: BaseException) -> None:
        self._lose(TransportError(f"a call was interrupted: {type(error).__name__}"))

    def _end(self, error: KvplugError, *, closed: bool = False) -> bool:
        """Make every call raise ``error`` from now on. Return whether this is the first end."""
        with self._lock:
            first = not self._closed if closed else self._ended is None
            self._closed |= closed
            if self._ended is None or (closed and first):
                self._ended = error
            for call in self._calls.values():
                call.answers.put(None)
            self._turn.notify_all()
            return first

    def _end_at_exit(self) -> None:
        self.abort()

    def _is_in_use(self) -> bool:
        return bool(self._calls)

    def _after_fork_in_child(self) -> None:
        self._calls.clear()
        self._closed = True
        self._ended = ClosedError("this end of the lookup buffer belongs to the parent process")
