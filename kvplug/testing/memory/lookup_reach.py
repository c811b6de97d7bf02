"""The end that reaches a store "memory" over two pipes.

Two threads: one hears answers on the signal pipe, one receives the entries that were announced there from the
data pipe. Both put what came where its caller waits for it, so that no call holds another one up.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs

from kvplug.errors import (
    ClosedError,
    EntryGoneError,
    KvplugError,
    PeerGoneError,
    TimeoutError,
    TransportError,
    UnsupportedError,
)
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.fork import close_after_fork
from kvplug.testing.memory.entries import hand_over
from kvplug.testing.memory.lookup_session import SignalLine, header_from_plain
from kvplug.testing.memory.tokens import extra_bytes, key_under
from kvplug.transport.lookup import Entry, EntrySink, LookupBuffer
from kvplug.transport.pipe import Pipe

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

_LAST_WORD_S = 5.0
"""The word that ends a call is a few bytes: a signal pipe that has no room for it for so long is given up."""

_ERRORS: dict[str, type[KvplugError]] = {"EntryGoneError": EntryGoneError, "ClosedError": PeerGoneError}


@attrs.define(eq=False)
class _Call:
    number: int
    answer: Entry | int | KvplugError | None = None


class MemoryReachingEnd(LookupBuffer):
    """Any method may be called from any thread, and several at once. Entries are inserted elsewhere."""

    def __init__(self, signal: Pipe, data: Pipe, *, timeout_s: float) -> None:
        self._signal, self._data = signal, data
        self._line = SignalLine(signal)
        self._timeout_s = timeout_s
        self._changed = threading.Condition()  # guards the calls and how it ended
        self._numbers = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._ended: KvplugError | None = None
        """What every call raises from now on."""
        self._announced: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        close_after_fork(self)
        self._threads = [
            threading.Thread(target=self._hear, name="kvplug-memory-hear", daemon=True),
            threading.Thread(target=self._receive, name="kvplug-memory-receive", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_lost(self) -> bool:
        return self._ended is not None

    # -- the buffer ----------------------------------------------------------------------------

    def insert(
        self,
        input_tokens: Any,
        roi: Any,
        key: Tensor | None,
        value: Tensor | None,
        hidden: Tensor | None,
        *,
        extra: bytes = b"",
        metadata: dict[str, Any] | None = None,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> int:
        self._check()
        raise UnsupportedError(
            "entries are inserted at the end that holds the store, where they are computed"
        )

    def match(self, input_tokens: Any, roi: Any = None, *, extra: bytes = b"") -> int:
        deadline = Deadline.after(self._timeout_s)
        key = key_under(input_tokens, roi)
        with self._call() as call:
            self._say("match", call.number, key, extra_bytes(extra), deadline=deadline)
            return self._answer(call, deadline)  # type: ignore[no-any-return]

    def drop_select(
        self,
        input_tokens: Any,
        roi: Any = None,
        *,
        extra: bytes = b"",
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Entry:
        deadline = Deadline.after(timeout, self._timeout_s)
        key = None if input_tokens is None else key_under(input_tokens, roi)
        with self._call() as call, self._last_word(call):
            self._say("take", call.number, key, extra_bytes(extra), deadline=deadline)
            return self._answer(call, deadline)  # type: ignore[no-any-return]

    def select(
        self,
        input_tokens: Any,
        roi: Any = None,
        *,
        extra: bytes = b"",
        min_tokens: int = 1,
        sink: EntrySink | None = None,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Entry:
        deadline = Deadline.after(timeout, self._timeout_s)
        key = key_under(input_tokens, roi)
        with self._call() as call, self._last_word(call):
            self._say("read", call.number, key, extra_bytes(extra), min_tokens, deadline=deadline)
            return hand_over(self._answer(call, deadline), sink, deadline)

    # -- calls ---------------------------------------------------------------------------------

    @contextmanager
    def _call(self) -> Iterator[_Call]:
        with self._changed:
            self._check()
            call = _Call(next(self._numbers))
            self._calls[call.number] = call
        try:
            yield call
        finally:
            with self._changed:
                del self._calls[call.number]

    @contextmanager
    def _last_word(self, call: _Call) -> Iterator[None]:
        """Say how a call ended. Whoever could not say so has not had the entry."""
        try:
            yield
        except BaseException:
            if self._ended is None:
                try:
                    self._line.say("done", call.number, False, deadline=Deadline.after(_LAST_WORD_S))
                except KvplugError as e:
                    self._lose(e)
            raise
        self._say("done", call.number, True, deadline=Deadline.after(_LAST_WORD_S))

    def _say(self, *words: Any, deadline: Deadline) -> None:
        try:
            self._line.say(*words, deadline=deadline)
        except KvplugError:
            self._check()
            raise

    def _answer(self, call: _Call, deadline: Deadline) -> Any:
        with self._changed:
            came = lambda: call.answer is not None or self._ended is not None  # noqa: E731
            arrived = self._changed.wait_for(came, deadline.remaining())
            self._check()
            if not arrived:
                raise TimeoutError(f"no answer of the lookup store at {self._signal.peer} came in time")
            if isinstance(call.answer, KvplugError):
                raise call.answer
            return call.answer

    def _check(self) -> None:
        if self._ended is not None:
            raise type(self._ended)(str(self._ended)) from self._ended

    # -- what comes ----------------------------------------------------------------------------

    def _hear(self) -> None:
        try:
            while (words := self._line.hear()) != ["end"]:
                verb, number, *said = words
                if verb == "matched":
                    self._put(number, said[0])
                elif verb == "coming":
                    self._announced.put([number, *said])
                else:
                    name, text = said
                    self._put(number, _ERRORS.get(name, TransportError)(text))
            self._lose(PeerGoneError(f"the lookup store at {self._signal.peer} has closed"))
        except KvplugError as e:
            self._lose(e)
        except Exception as e:
            self._lose(TransportError(f"answers of the lookup store stop: {type(e).__name__}: {e}"))

    def _receive(self) -> None:
        try:
            while (announced := self._announced.get()) is not None:
                number, *plain = announced
                header = header_from_plain(plain)
                key, value, hidden = (self._data.recv_tensor(timeout=None) for _ in range(3))
                parts = {"tokens": header.tokens, "roi": header.roi}
                self._put(number, Entry(header=header, **parts, key=key, value=value, hidden=hidden))
        except KvplugError as e:
            self._lose(e)
        except Exception as e:
            self._lose(TransportError(f"entries of the lookup store stop: {type(e).__name__}: {e}"))

    def _put(self, number: int, answer: Entry | int | KvplugError) -> None:
        with self._changed:
            call = self._calls.get(number)
            if call is not None:  # or its caller has gone
                call.answer = answer
                self._changed.notify_all()

    # -- ending --------------------------------------------------------------------------------

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        deadline = Deadline.after(timeout, self._timeout_s)
        was_open = self._ended is None
        self._end(ClosedError("this end of the lookup buffer is closed"))
        if was_open:
            try:
                self._line.say("end", deadline=deadline)
            except KvplugError as e:
                _log.debug("the store at %s was not told of the end: %s", self._signal.peer, e)
        self._signal.close(deadline.remaining())
        self._data.close(deadline.remaining())
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(deadline.remaining())

    def abort(self) -> None:
        self._end(ClosedError("this end of the lookup buffer was aborted"))
        self._signal.abort()
        self._data.abort()

    def _lose(self, error: KvplugError) -> None:
        """The store cannot be reached any more."""
        self._end(error)
        self._signal.abort()
        self._data.abort()

    def _end(self, error: KvplugError) -> None:
        with self._changed:
            if self._ended is None or (
                isinstance(error, ClosedError) and not isinstance(self._ended, ClosedError)
            ):
                self._ended = error
            self._changed.notify_all()
        self._announced.put(None)

    def _after_fork_in_child(self) -> None:
        self._changed = threading.Condition()  # the old one may be held by a thread that is not here
        self._ended = ClosedError("this end of the lookup buffer belongs to the parent of this process")
