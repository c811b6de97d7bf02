"""A pipe that wraps any pipe and injects the faults of a plan."""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from kvplug import errors
from kvplug.errors import ClosedError, KvplugError, PeerGoneError, TimeoutError
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.exclusive_use import ExclusiveUse
from kvplug.net.fork import close_after_fork
from kvplug.transport.duplex.limit import MessageLimit
from kvplug.transport.pipe import PathReport, Pipe, Transfer
from kvplug_testing.faults.messages import copied, fill, flipped, nbytes_of
from kvplug_testing.faults.plan import BEFORE, Plan
from kvplug_testing.faults.schedule import FaultSchedule, Injection, PlanRecord

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

LEAVING_S: Final = 5.0
"""The longest time that ``disconnect`` and ``kill`` wait until earlier messages are sent."""


class _Limit:
    """The deadline of one call. Without a timeout of the caller, the inner pipe uses its own default."""

    def __init__(self, timeout: Timeout, timeout_s: float) -> None:
        self.deadline = Deadline.after(timeout, timeout_s)
        self._timeout = timeout

    def left(self) -> Timeout:
        return self._timeout if self._timeout is DEFAULT_TIMEOUT else self.deadline.remaining()


class _Direction:
    """The progress of one direction, and the faults that have already hit the next message."""

    def __init__(self, what: str, course: FaultSchedule) -> None:
        self.what = what
        self.turn = ExclusiveUse(what)
        self.course = course
        self.until: dict[int, float] = {}
        """By the rule's position: the time until which it delays this message."""
        self.happened: set[int] = set()
        """Positions of the rules that have already been applied to this message."""
        self.late: list[Tensor | None] = []
        """A swapped message, which is sent after the next one."""

    def advance(self, nbytes: int) -> None:
        self.course.advance(nbytes)
        self.until.clear()
        self.happened.clear()

    def pass_late(self) -> list[Tensor | None]:
        late, self.late = self.late, []
        return late


class FaultyPipe(Pipe):
    """A pipe around another one that injects faults. With an empty plan it behaves like the inner pipe.

    Faults happen only at this end. The inner pipe's wire format is unchanged, so the other end needs no plan
    and does not know of this one.
    """

    def __init__(
        self,
        pipe: Pipe,
        plan: Plan,
        *,
        number: int = 1,
        when: Callable[[], bool] | None = None,
        timeout_s: float = 30.0,
        record: PlanRecord | None = None,
    ) -> None:
        """Wrap ``pipe`` with ``plan``.

        Args:
            number: this pipe's number, for rules that name one.
            record: that of all pipes of the plan; by default this pipe has its own.
            when: called before each fault; the fault happens only if it returns true.
            timeout_s: how long a rule may delay a call without a timeout.
        """
        self.pipe = pipe
        """The inner pipe."""
        self.hits: collections.Counter[str] = collections.Counter()
        """How often each action has happened. A ``flip`` without a bit to flip does not count."""
        self._record = PlanRecord(plan) if record is None else record
        self._record.begin(self)
        self._when = when
        self._timeout_s = timeout_s
        self._sending = _Direction("sending", FaultSchedule(plan, "send", number))
        self._receiving = _Direction("receiving", FaultSchedule(plan, "recv", number))
        self._limit = MessageLimit()
        self._last: Transfer | None = None
        self._owed: deque[Tensor | None] = deque()
        """Messages to send next: second copies, and swapped ones."""
        self._inbox: deque[tuple[Tensor | None, float]] = deque()
        """Received messages, each with the time from which the caller may receive it."""
        self._over = threading.Event()
        self._closed = False
        self._lost = False
        close_after_fork(self)

    def __repr__(self) -> str:
        happened = ", ".join(f"{count} x {what}" for what, count in self.hits.items()) or "no fault yet"
        return f"<FaultyPipe over {self.pipe!r}: {happened}>"

    @property
    def closed(self) -> bool:
        return self._closed or (self.pipe.closed and not self._lost)

    @property
    def peer(self) -> str:
        return self.pipe.peer

    def path_report(self) -> PathReport:
        return self.pipe.path_report()

    @property
    def _name(self) -> str:
        """The name of this end, for error messages."""
        return f"pipe to {self.peer}"

    # -- sending -------------------------------------------------------------------------------

    def send_tensor(self, tensor: Tensor | None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Transfer:
        with self._sending.turn.taken():
            self._check()
            if not self._sending.course:
                with self._inner_call():
                    self._last = self.pipe.send_tensor(tensor, timeout=timeout)
                return self._last
            limit = _Limit(timeout, self._timeout_s)
            self._pay(limit)
            transfer = self._send(tensor, limit)
            with contextlib.suppress(
                KvplugError
            ):  # the message was accepted: the next call sends the rest, or raises
                self._pay(limit)
            return transfer

    def _send(self, tensor: Tensor | None, limit: _Limit) -> Transfer:
        nbytes = self._nbytes_of(tensor)
        hits = self._now(self._sending, nbytes)
        for hit in hits:
            if hit.rule.do in BEFORE:
                self._before(self._sending, hit, limit.deadline)
            elif held_s := _held_s(hit, nbytes):
                self._wait(self._until(self._sending, hit, held_s), limit.deadline, hit)
        copies = self._copies(tensor, hits)
        transfer = Transfer(nbytes)
        if copies and not (_swaps(hits) and not self._sending.late):
            with self._inner_call():
                transfer = self.pipe.send_tensor(copies.pop(0), timeout=limit.left())
            self._last = transfer
            self._owed += [*copies, *self._sending.pass_late()]
        else:
            # Keep only copies: the caller may overwrite the tensor.
            self._sending.late += [self._copied(tensor) if each is tensor else each for each in copies]
            transfer.finish()
        self._sending.advance(nbytes)
        self._record.count(nbytes)
        self._note(hits, tensor, nbytes)
        return transfer

    def _pay(self, limit: _Limit) -> None:
        """Send the messages that are due. Raises TimeoutError if there is no capacity in time."""
        while self._owed:
            with self._inner_call():
                self._last = self.pipe.send_tensor(self._owed[0], timeout=limit.left())
            self._owed.popleft()

    # -- receiving -----------------------------------------------------------------------------

    def recv_tensor(self, out: Tensor | None = None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Tensor | None:
        with self._receiving.turn.taken():
            self._check()
            if not self._receiving.course:
                with self._inner_call():
                    return self.pipe.recv_tensor(out, timeout=timeout)
            limit = _Limit(timeout, self._timeout_s)
            while not self._inbox:
                possible = self._now(self._receiving, None)
                for hit in possible:
                    if hit.rule.do in BEFORE:
                        self._before(self._receiving, hit, limit.deadline)
                bounded = out is None and self._limit.is_lowered
                straight = not bounded and all(hit.rule.do in BEFORE for hit in possible)
                try:
                    with self._inner_call():
                        message = self.pipe.recv_tensor(out if straight else None, timeout=limit.left())
                except PeerGoneError:
                    if not self._receiving.late:
                        raise
                    self._put(self._receiving.pass_late())  # no message came to swap it with
                    break
                hits = [hit for hit in possible if self._nbytes_of(message) >= hit.rule.min_bytes]
                self._receiving.advance(self._nbytes_of(message))
                self._record.count(self._nbytes_of(message))
                self._note(hits, message, self._nbytes_of(message))
                if straight:
                    self._put(self._receiving.pass_late())
                    return message
                self._take(message, hits)
            return self._hand_over(out, limit.deadline)

    def _take(self, message: Tensor | None, hits: list[Injection]) -> None:
        """Apply the faults to a received message, and put the resulting copies into the inbox."""
        copies = self._copies(message, hits)
        if _swaps(hits) and not self._receiving.late:
            self._receiving.late = copies
            return
        held_s = sum(_held_s(hit, self._nbytes_of(message)) for hit in hits if hit.rule.do not in BEFORE)
        self._put([*copies, *self._receiving.pass_late()], time.monotonic() + held_s)

    def _put(self, messages: list[Tensor | None], ready_at: float = 0.0) -> None:
        self._inbox += [(message, ready_at) for message in messages]

    def _hand_over(self, out: Tensor | None, deadline: Deadline) -> Tensor | None:
        message, ready_at = self._inbox[0]
        self._wait(ready_at, deadline)
        if out is None:
            self._limit.check(self._nbytes_of(message), self.peer)
        received = message if out is None else fill(out, message)
        self._inbox.popleft()
        return received

    # -- both directions -----------------------------------------------------------------------

    def _now(self, direction: _Direction, nbytes: int | None) -> list[Injection]:
        return [hit for hit in direction.course.hits(nbytes) if self._when is None or self._when()]

    def _before(self, direction: _Direction, hit: Injection, deadline: Deadline) -> None:
        if hit.position in direction.happened:
            return
        rule = hit.rule
        if rule.do == "stop":
            seconds = math.inf if rule.seconds is None else rule.seconds
            self._wait(self._until(direction, hit, seconds), deadline, hit)
        else:
            with contextlib.suppress(KvplugError):
                if self._last is not None and rule.do != "raise":  # earlier messages are sent whole
                    self._last.wait(min(max(0.0, deadline.at - time.monotonic()), LEAVING_S))
        direction.happened.add(hit.position)
        self._happens(hit, f"{direction.what}")
        if rule.do == "raise":
            raise getattr(errors, str(rule.error))(f"a planned fault: {hit}")
        if rule.do == "kill":
            # Signal this thread: a signal to the process takes effect only when some thread receives it, and
            # until then this thread would go on sending.
            signal.pthread_kill(threading.get_ident(), getattr(signal, rule.signal or "SIGKILL"))
        if rule.do == "disconnect":
            self._lost = True
            self._over.set()
            self.pipe.abort()
            self._check()

    def _until(self, direction: _Direction, hit: Injection, seconds: float) -> float:
        return direction.until.setdefault(hit.position, time.monotonic() + seconds)

    def _wait(self, until: float, deadline: Deadline, hit: Injection | None = None) -> None:
        """Wait until this time.

        Raises:
            TimeoutError: the deadline is earlier. The message stays in place.
            ClosedError, PeerGoneError: this pipe ended in the meantime.
        """
        left = min(until, deadline.at) - time.monotonic()
        if left > 0:
            self._over.wait(None if math.isinf(left) else left)
            self._check()
        if until > deadline.at:
            raise TimeoutError(f"a planned fault holds a message up: {hit or 'one that was received'}")

    def _note(self, hits: list[Injection], message: Tensor | None, nbytes: int) -> None:
        for hit in hits:
            if hit.rule.do == "flip" and not self._has_bits(message):
                _log.info("planned fault: %s finds nothing to flip, %s", hit, self._name)
            elif hit.rule.do not in BEFORE:
                self._happens(hit, f"{nbytes} bytes")

    def _happens(self, hit: Injection, what: str) -> None:
        self.hits[hit.rule.do] += 1
        self._record.happened()
        _log.info("planned fault: %s (%s), %s", hit, what, self._name)

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"the {self._name} is closed")
        if self._lost:
            raise PeerGoneError(f"{self.peer} is gone: a planned fault")

    @contextlib.contextmanager
    def _inner_call(self) -> Iterator[None]:
        """A context for calls of the inner pipe: a planned disconnection looks like the peer's death."""
        try:
            yield
        except ClosedError:
            self._check()
            raise

    # -- messages ------------------------------------------------------------------------------

    def _nbytes_of(self, message: Tensor | None) -> int:
        return nbytes_of(message)

    def _copied(self, message: Tensor | None) -> Tensor | None:
        return copied(message)

    def _has_bits(self, message: Tensor | None) -> bool:
        """Whether there is anything to flip."""
        return nbytes_of(message) > 0

    def _flipped(self, message: Tensor | None, hit: Injection) -> Tensor | None:
        return None if message is None else flipped(message, hit.rule.bits or 1, hit.random())

    def _copies(self, message: Tensor | None, hits: list[Injection]) -> list[Tensor | None]:
        """The messages that result from one message and its faults."""
        actions = [hit.rule.do for hit in hits]
        if "drop" in actions:
            return []
        for hit in hits:
            if hit.rule.do == "flip":
                message = self._flipped(message, hit)
        return [message, *(self._copied(message) for _ in range(actions.count("duplicate")))]

    # -- ends ----------------------------------------------------------------------------------

    def limit_messages(self, nbytes: int) -> None:
        self._limit.lower(nbytes)
        if not self._receiving.course:  # else messages are received without ``out``, to be changed
            self.pipe.limit_messages(nbytes)

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        deadline = Deadline.after(timeout, self._timeout_s)
        self._closed = True
        self._over.set()
        with contextlib.suppress(KvplugError), self._sending.turn.taken():
            for message in (*self._owed, *self._sending.pass_late()):
                self.pipe.send_tensor(message, timeout=deadline.remaining())
        self._owed.clear()
        self._record.end(self)
        self.pipe.close(deadline.remaining())

    def abort(self) -> None:
        self._closed = True
        self._over.set()
        self._record.end(self)
        self.pipe.abort()

    def _after_fork_in_child(self) -> None:
        self._sending.turn, self._receiving.turn = ExclusiveUse("sending"), ExclusiveUse("receiving")
        self._over = threading.Event()
        self._over.set()
        self._closed = True


def _held_s(hit: Injection, nbytes: int) -> float:
    """How long ``delay`` and ``slow`` hold a message; 0 for other actions."""
    if hit.rule.do == "delay":
        return hit.rule.seconds or 0.0
    return nbytes / (hit.rule.bytes_per_s or 1) if hit.rule.do == "slow" else 0.0


def _swaps(hits: list[Injection]) -> bool:
    return any(hit.rule.do == "swap" for hit in hits)
