"""How the store "memory" serves one reaching end, and what the two say to each other.

The reaching end numbers its calls, and speaks on the signal pipe::

    ["match", number, key, extra]               ─► ["matched", number, tokens]
    ["take",  number, key or None, extra]       ─► ["coming", number, header], and on the data pipe
    ["read",  number, key, extra, min_tokens]      key, value, hidden, each of which may be None
    ["done",  number, whether it has it all]    ─► nothing
    ["end"]                                     ─► nothing; the store says the same when it closes

``["failed", number, error, text]`` answers any of them. A call that takes or reads has a thread here, from
its first word to ``done``; so an entry is lent exactly as long as that thread has it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

from kvplug.errors import KvplugError, WireError
from kvplug.net.deadline import Deadline
from kvplug.net.wire.tensors import memory_of
from kvplug.net.wire.values import decode, encode
from kvplug.transport.lookup import EntryHeader
from kvplug.transport.pipe import Pipe, Transfer

if TYPE_CHECKING:
    from kvplug.testing.memory.lookup import Loan, MemoryStore

_log = logging.getLogger(__name__)


class SignalLine:
    """A pipe for small values, on which several threads may speak and one listens."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._speaking = threading.Lock()

    def say(self, *words: Any, deadline: Deadline) -> None:
        import torch

        message = torch.frombuffer(bytearray(encode(list(words))), dtype=torch.uint8)
        with self._speaking:
            self._pipe.send_tensor(message, timeout=deadline.remaining())

    def hear(self) -> list[Any]:
        """The next one, however long it takes.

        Raises:
            WireError: it is no list that begins with a word.
        """
        message = self._pipe.recv_tensor(timeout=None)
        words = None if message is None else decode(memory_of(message))
        if not isinstance(words, list) or not words or not isinstance(words[0], str):
            raise WireError("what came on the signal pipe is no message of a lookup buffer")
        return words


def header_to_plain(header: EntryHeader) -> list[Any]:
    return [header.entry_id, header.tokens, header.roi, header.num_layers, header.metadata]


def header_from_plain(plain: list[Any]) -> EntryHeader:
    entry_id, tokens, roi, num_layers, metadata = plain
    return EntryHeader(entry_id=entry_id, tokens=tokens, roi=roi, num_layers=num_layers, metadata=metadata)


@attrs.define(eq=False)
class _Call:
    """One that takes or reads, and has not ended."""

    number: int
    has_it: bool | None = None
    """The caller's last word; ``False`` too when the caller is gone."""

    @property
    def is_over(self) -> bool:
        return self.has_it is not None


class Session:
    """One reaching end, as long as it is served."""

    def __init__(self, store: MemoryStore, signal: Pipe, data: Pipe) -> None:
        self._store = store
        self._signal, self._data = signal, data
        self._line = SignalLine(signal)
        self._sending = threading.Lock()  # one entry at a time, in the order in which they were announced
        self._calls: dict[int, _Call] = {}
        self._ended = False
        self._thread = threading.Thread(target=self._listen, name="kvplug-memory-session", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, deadline: Deadline) -> None:
        """Tell the other end that this is the end, and close the pipes."""
        try:
            self._line.say("end", deadline=deadline)
        except KvplugError as e:
            _log.debug("%s was not told that the store closes: %s", self._signal.peer, e)
        self._signal.close(deadline.remaining())
        self._data.close(deadline.remaining())

    def end(self) -> None:
        """At once. Calls that have not ended have failed: what was lent for them goes back. Idempotent."""
        self._ended = True
        self._signal.abort()
        self._data.abort()
        for call in list(self._calls.values()):
            if call.has_it is None:
                call.has_it = False
        self._store.forget(self)

    # -- requests ------------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            while (words := self._line.hear()) != ["end"]:
                self._serve(*words)
        except KvplugError as e:
            _log.debug("%s is served no more: %s", self._signal.peer, e)
        except Exception:
            _log.exception("%s is served no more", self._signal.peer)
        finally:
            self.end()

    def _serve(self, verb: str, number: int, *asked: Any) -> None:
        who = self._signal.peer
        if verb == "match":
            key, extra = asked
            self._answer(number, lambda: self._say("matched", number, self._store.count_shared(key, extra)))
        elif verb == "take":
            key, extra = asked
            for_ever = Deadline.after(None)  # the caller knows when its time is up, and says so
            self._begin(
                number, lambda call: self._store.lend_oldest(key, extra, who, for_ever, lambda: call.is_over)
            )
        elif verb == "read":
            key, extra, min_tokens = asked
            self._begin(number, lambda call: self._store.lend_longest(key, extra, min_tokens, who))
        elif verb == "done":
            if number in self._calls:
                (self._calls[number].has_it,) = asked
                self._store.wake()
        else:
            raise WireError(f"a reaching end does not say {verb!r}")

    def _begin(self, number: int, lend: Callable[[_Call], Loan]) -> None:
        call = self._calls[number] = _Call(number)
        if self._ended:
            call.has_it = False  # in the very moment: whoever ended the session may not have seen it
        run = lambda: self._answer(number, lambda: self._lend(call, lend))  # noqa: E731
        threading.Thread(target=run, name="kvplug-memory-call", daemon=True).start()

    def _answer(self, number: int, work: Callable[[], None]) -> None:
        """Do it; where it fails, say so; where that cannot be said, nobody is there."""
        try:
            try:
                work()
            except KvplugError as e:
                self._say("failed", number, type(e).__name__, str(e))
        except KvplugError:
            self.end()

    def _lend(self, call: _Call, lend: Callable[[_Call], Loan]) -> None:
        try:
            loan = lend(call)
        except KvplugError:
            del self._calls[call.number]
            raise
        try:
            transfers = self._send(call, loan)
            self._store.wait_until(lambda: call.is_over)
            for transfer in transfers:
                transfer.wait()  # the entry's memory is the pipe's until then
        finally:
            del self._calls[call.number]
            self._store.end(loan, taken=call.has_it is True)

    def _send(self, call: _Call, loan: Loan) -> list[Transfer]:
        entry = loan.held.entry
        with self._sending:
            if call.is_over:
                return []
            self._say("coming", call.number, *header_to_plain(entry.header))
            parts = (entry.key, entry.value, entry.hidden)
            return [self._data.send_tensor(part, timeout=None) for part in parts]

    def _say(self, *words: Any) -> None:
        self._line.say(*words, deadline=Deadline.after(None))
