"""The end that reaches a store over a signal pipe and a data pipe.

One thread listens to the signal pipe and hands each answer to its call. The calling thread receives the
entry's tensors itself, so a sink runs there and its error reaches the caller.

A call that gives up midway (a timeout, or a sink that raised) sends ``Cancel``, so that the entry is back at
once. :class:`~kvplug_lookup.buffer.delivery.Deliveries` drains the rest of its tensors.

A store that has proved its identity may still be faulty or malicious, so its answers are compared with the
requests. An answer that no call waits for, an entry of other tokens, or a match longer than the query ends
the connection.
"""

from __future__ import annotations

import copy
import itertools
import logging
import threading
from collections import deque
from typing import Any, NoReturn

import attrs
import torch

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
from kvplug.engine import EntryGoneError
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    BackgroundThread,
    Deadline,
    Entry,
    ExitGuard,
    LookupBuffer,
    NamedExhaustion,
    Pipe,
    Timeout,
    WireError,
    close_after_fork,
    peer_text,
)
from kvplug_lookup.buffer.delivery import CutShortError, Deliveries, Delivery
from kvplug_lookup.buffer.index import TokenArray
from kvplug_lookup.buffer.messages import (
    MAX_SIGNAL_BYTES,
    Cancel,
    Coming,
    Done,
    End,
    Failed,
    Granted,
    Match,
    Matched,
    Message,
    Read,
    Take,
    deadline_lock,
    key_to_bytes,
    pack,
    unpack,
)
from kvplug_lookup.buffer.parts import describe_query, extra_bytes, key_under

_log = logging.getLogger(__name__)

_CANCEL_TIMEOUT_S = 1.0
"""How long to wait for room on the signal pipe for the few bytes of a ``Cancel``."""

_SETTLE_S = 1.0
"""How far ``drop_select`` may pass its timeout once the whole entry has arrived."""

_ERRORS: dict[str, type[KvplugError]] = {
    error.__name__: error
    for error in (EntryGoneError, TimeoutError, UnsupportedError, CapacityError, WireError)
} | {"ClosedError": PeerGoneError}
"""The errors that a ``Failed`` may raise here."""


_MATCH, _READ, _TAKE = (Matched, Failed), (Coming, Failed), (Coming, Failed, Granted)
"""The answers that the store may send to a call, each once."""
_MAX_LEFT = 4096
"""How many calls are remembered that gave up before their entry was announced: it may still arrive."""


@attrs.define(eq=False)
class _Call:
    number: int
    woken: threading.Condition
    open: set[type[Message]]
    """Answers that may still arrive."""
    answers: deque[Message] = attrs.field(factory=deque)
    delivery: Delivery | None = None


@attrs.frozen
class _Query:
    """The key of a request for an entry."""

    key: TokenArray | None
    """Tokens under the roi; ``None``: any."""
    extra: bytes
    min_tokens: int = 0
    """How many leading tokens the entry must share; 0: one key is a prefix of the other."""

    def wants(self, coming: Coming) -> bool:
        """Whether the entry answers the query."""
        key = coming.key_tokens
        if coming.extra != self.extra or not key.size:
            return False
        if self.key is None:
            return True
        size = min(key.size, self.key.size) if not self.min_tokens else self.min_tokens
        common = 0 < size <= min(key.size, self.key.size)
        return common and bool((key[:size] == self.key[:size]).all())


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
        signal.limit_messages(MAX_SIGNAL_BYTES)
        self._signal = signal
        self._data = data
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._numbers = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._left: dict[int, None] = {}
        """Calls that gave up before their entry was announced, oldest first."""
        self._deliveries = Deliveries(
            data,
            torch.device(device),
            max_bytes=max_message_bytes,
            lock=self._lock,
            check=self._check,
            lose=self._lose,
        )
        self._ended: KvplugError | None = None
        """The error that every call raises from now on."""
        self._closed = False
        close_after_fork(self)
        ExitGuard.register(self)
        self._router = BackgroundThread(self._route, name="kvplug-lookup-reach", stop=self.abort)
        with NamedExhaustion("reaching a lookup store"):
            self._router.start()

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
        key = key_to_bytes(key_under(input_tokens, roi))
        call = self._open(_MATCH)
        try:
            self._send_or_lose(Match(call.number, key, extra_bytes(extra)), deadline)
            answer = self._answer(call, deadline, "a match")
            assert isinstance(answer, Matched)
            if answer.num_tokens > len(key) // 8:
                self._break(f"got a match of {answer.num_tokens} tokens for a query of {len(key) // 8}")
            return answer.num_tokens
        finally:
            self._leave(call)

    def drop_select(
        self,
        input_tokens: Any,
        roi: Any = None,
        *,
        extra: bytes = b"",
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Entry:
        deadline = Deadline.after(timeout, self._timeout_s)
        query = _Query(None if input_tokens is None else key_under(input_tokens, roi), extra_bytes(extra))
        call, ended = self._open(_TAKE), False
        try:
            key = None if query.key is None else key_to_bytes(query.key)
            self._send_or_lose(Take(call.number, key, query.extra, deadline.remaining()), deadline)
            entry = self._fetch(call, query, None, deadline)
            # The entry is complete, but only the store can grant it to one caller. Leaving now could lose the
            # entry for everyone, so wait a little longer for the answer, which the store sends at once.
            last = Deadline(max(deadline.at, Deadline.after(_SETTLE_S).at))
            self._send_or_lose(Done(call.number), last)
            granted = self._answer(call, last, "the grant of an entry")
            ended = True
            assert isinstance(granted, Granted)
            if not granted.is_yours:
                raise TimeoutError("the entry did not arrive in time; it is back in the store")
            return entry
        finally:
            self._leave(call, cancel=not ended)

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
        deadline = Deadline.after(timeout, self._timeout_s)
        key = key_under(input_tokens, roi)
        query = _Query(key, extra_bytes(extra), max(1, min_tokens))
        call, ended = self._open(_READ), False
        try:
            self._send_or_lose(
                Read(call.number, key_to_bytes(key), query.extra, query.min_tokens, deadline.remaining()),
                deadline,
            )
            entry = self._fetch(call, query, sink, deadline)
            self._send_or_lose(Done(call.number), deadline)
            ended = True
            return entry
        finally:
            self._leave(call, cancel=not ended)

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        deadline = Deadline.after(timeout, self._timeout_s)
        if not self._end(ClosedError("this end of the lookup buffer is closed"), closed=True):
            return
        try:
            self._send(End(), deadline)
        except KvplugError as e:
            _log.debug("could not send the end signal to the store at %s: %s", self._signal.peer, e)
        self._signal.close(deadline.remaining())
        self._data.close(deadline.remaining())
        if threading.current_thread() is not self._router:
            self._router.join(deadline.remaining())

    def abort(self) -> None:
        self._end(ClosedError("this end of the lookup buffer was aborted"), closed=True)
        self._signal.abort()
        self._data.abort()

    # -- calls ---------------------------------------------------------------------------------

    def _open(self, answers: tuple[type[Message], ...]) -> _Call:
        with self._lock:
            self._check()
            call = _Call(next(self._numbers), threading.Condition(self._lock), set(answers))
            self._calls[call.number] = call
            return call

    def _leave(self, call: _Call, *, cancel: bool = False) -> None:
        """End a call. Another thread drains what has not arrived of its entry."""
        with self._lock:
            del self._calls[call.number]
            delivery, ended = call.delivery, self._ended
            if Coming in call.open and Failed in call.open:
                self._left[call.number] = None
                if len(self._left) > _MAX_LEFT:
                    del self._left[next(iter(self._left))]
        if ended is not None:
            return
        if delivery is not None:
            self._deliveries.leave(delivery)
        if cancel:
            try:
                self._send(Cancel(call.number), Deadline.after(_CANCEL_TIMEOUT_S))
            except KvplugError as e:
                self._lose(e)

    def _send_or_lose(self, message: Message, deadline: Deadline) -> None:
        try:
            self._send(message, deadline)
        except (TimeoutError, UnsupportedError, CapacityError, ResourceExhaustedError):
            raise  # nothing was sent
        except KvplugError as e:
            self._lose(e)
            self._check()

    def _send(self, message: Message, deadline: Deadline) -> None:
        tensor = pack(message)
        with deadline_lock(self._sending, deadline):
            self._signal.send_tensor(tensor, timeout=deadline.remaining())

    def _answer(self, call: _Call, deadline: Deadline, what: str) -> Message:
        """The next answer to a call.

        Raises:
            TimeoutError: no answer arrived.
            KvplugError: the store reports that the call failed, or this end has ended.
        """
        with self._lock:
            while not call.answers:
                self._check()
                if deadline.expired:
                    raise TimeoutError(f"{what}: no answer from the store at {self._signal.peer} in time")
                call.woken.wait(deadline.remaining())
            answer = call.answers.popleft()
        if isinstance(answer, Failed):
            text = f"{what}: {peer_text(answer.text)}"
            if answer.resource:
                at = f"the lookup store at {self._signal.peer}"
                raise ResourceExhaustedError(f"{at}: {text}", resource=peer_text(answer.resource))
            raise _ERRORS.get(answer.error, TransportError)(text)
        return answer

    # -- entries -------------------------------------------------------------------------------

    def _fetch(self, call: _Call, query: _Query, sink: LookupBuffer.Sink | None, deadline: Deadline) -> Entry:
        """Receive the entry that answers a call, in its turn."""
        what = describe_query(query.key)
        coming = self._answer(call, deadline, what)
        delivery = call.delivery
        if not isinstance(coming, Coming) or delivery is None:
            self._break(f"got {type(coming).__name__} as the answer to a request for an entry")
        if not query.wants(coming):
            self._break(f"{what}: got entry {coming.entry_id}, which has other tokens")
        try:
            return self._deliveries.receive(delivery, sink, deadline)
        except CutShortError:
            self._answer(call, deadline, what)  # raises the reason
            self._break("an entry was cut short without a reason")

    # -- the thread that listens ---------------------------------------------------------------

    def _route(self) -> None:
        try:
            while True:
                message = unpack(self._signal.recv_tensor(timeout=None))
                if isinstance(message, End):
                    self._lose(PeerGoneError(f"the lookup store at {self._signal.peer} has closed"))
                    return
                self._take_answer(message)
        except KvplugError as e:
            self._lose(e)
        except Exception as e:
            _log.exception("the thread for answers of the lookup store at %s failed", self._signal.peer)
            self._lose(TransportError(f"a lookup buffer's thread failed: {type(e).__name__}: {e}"))

    def _take_answer(self, message: Message) -> None:
        if not isinstance(message, Matched | Granted | Failed | Coming):
            raise WireError(f"a store must not send {type(message).__name__}")
        forsaken = None
        with self._lock:
            call = self._calls.get(message.call)
            if call is not None:
                if type(message) not in call.open:
                    raise WireError(f"got an unexpected {type(message).__name__}")
                call.open.discard(type(message))
                if isinstance(message, Coming):
                    call.delivery = self._deliveries.announce(message)
                call.answers.append(message)
                call.woken.notify()
            elif isinstance(message, Coming):
                if message.call not in self._left:
                    raise WireError("the store announced an entry that was not asked for")
                del self._left[message.call]
                forsaken = self._deliveries.announce(message)
        if forsaken is not None:
            self._deliveries.leave(forsaken)

    # -- ending --------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._ended is not None:
            # A copy for each caller: an error that is raised repeatedly collects all their stacks.
            raise copy.copy(self._ended) from self._ended

    def _break(self, why: str) -> NoReturn:
        """End the connection: the store violates the protocol."""
        error = WireError(f"{why} (from the lookup store at {self._signal.peer})")
        self._lose(error)
        raise error

    def _lose(self, error: KvplugError) -> None:
        """End the connection with ``error``."""
        if self._end(error):
            self._signal.abort()
            self._data.abort()

    def _end(self, error: KvplugError, *, closed: bool = False) -> bool:
        """Make every call raise ``error`` from now on. Return whether this is the first end."""
        with self._lock:
            first = not self._closed if closed else self._ended is None
            if closed:
                self._closed = True
            if self._ended is None or (closed and first):
                self._ended = error
            for call in self._calls.values():
                call.woken.notify_all()
            self._deliveries.end()
            return first

    def _end_at_exit(self) -> None:
        self.abort()

    def _is_in_use(self) -> bool:
        return bool(self._calls)

    def _after_fork_in_child(self) -> None:
        self._calls.clear()
        self._closed = True
        self._ended = ClosedError("this end of the lookup buffer belongs to the parent process")
