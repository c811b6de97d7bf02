"""The store "host" in a process that reaches it over a link."""

from __future__ import annotations

import itertools
import logging
import math
import platform
import threading
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvplug import (
    ClosedError,
    HandshakeError,
    KvplugError,
    PeerGoneError,
    TransportError,
    UnsupportedError,
)
from kvplug.net.wire import memory_of_writable
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Deadline,
    GetJob,
    Job,
    MissReason,
    PageEvent,
    PageRequest,
    PageSeal,
    PagesSnapshot,
    Pipe,
    Presence,
    PutReason,
    Series,
    Store,
    StoreContext,
    StoreLink,
    Timeout,
    Transfer,
    Usage,
    WireError,
    close_after_fork,
    page_event_from_plain,
)
from kvplug_host import protocol
from kvplug_host.client.asking import Question
from kvplug_host.client.mapping import Mapping
from kvplug_host.client.piped_get import PipedGet
from kvplug_host.client.remote_put import RemotePut
from kvplug_host.jobs.clock import Clock
from kvplug_host.jobs.get import SlotGet
from kvplug_host.jobs.steps import Steps
from kvplug_host.jobs.workers import Workers
from kvplug_host.options import HostOptions
from kvplug_host.outbox import Outbox
from kvplug_host.protocol import Op

_log = logging.getLogger(__name__)

NAME: Final = "host"
_CLOSE_S: Final = 5.0
_READ_LEASE_S: Final = 30.0
"""The longest that pages are kept in their slots for a reader that does not say that it is done."""
_STAGES: Final = 4
"""Pieces of puts that are sent at the same time."""

Answer = Callable[[Any], None]


class HostClient(Store):
    """One end over one link. When the other process is gone, everything is a miss: it is lost."""

    def __init__(
        self,
        context: StoreContext,
        link: StoreLink,
        *,
        deadline: Deadline | None = None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        """Owns the link from here on.

        Args:
            deadline: for the first messages; default: the context's ``timeout_s``.
            on_lost: called when the other process is gone.

        Raises:
            WireError: the other end serves no store "host", or another version of it.
            TimeoutError, PeerGoneError, ClosedError: the other end does not answer.
        """
        options: HostOptions = context.options if context.options is not None else HostOptions()
        self.seal = PageSeal(checksums=context.seal.checksums)
        self._timeout_s = context.timeout_s
        self._link = link
        self._on_lost = on_lost
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._numbers = itertools.count(1)
        self._answers: dict[int, Answer] = {}
        """What is called with the answers of each request under way."""
        self._waiting: dict[int, Question[Any] | Steps] = {}
        """The jobs of those requests: they end when the store is gone."""
        self._jobs: set[Question[Any] | Steps] = set()
        self._puts: set[RemotePut] = set()
        self._listeners: dict[int, Callable[[PageEvent], None]] = {}
        self._closing = self._closed = self._is_gone = False
        self._pipe: Pipe | None = None
        self._mapping: Mapping | None = None
        self._sending = threading.Lock()
        self._stages: deque[tuple[Any, Transfer | None]] = deque()
        self._piped: dict[int, PipedGet] = {}
        self._pipe_thread: threading.Thread | None = None
        self._workers = Workers(NAME, options.threads)
        self._clock = Clock(NAME)
        try:
            self._begin(context, options, deadline or Deadline.after(context.timeout_s))
        except BaseException:
            self._release()
            raise
        self._outbox = Outbox(link.channel, "kvplug-host")
        close_after_fork(self)
        self._thread = threading.Thread(target=self._receive_all, name="kvplug-host-client", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as e:
            self._release()
            raise PeerGoneError(f"there is no thread that receives from the store: {e}") from e

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ", gone" if self._is_gone else ""
        return f"<store 'host' of {self._link.channel.peer}{state}>"

    def _begin(self, context: StoreContext, options: HostOptions, deadline: Deadline) -> None:
        hello = self._link.channel.recv(timeout=deadline.remaining())
        if not isinstance(hello, dict) or hello.get("store") != protocol.STORE:
            raise WireError(f"{self._link.channel.peer} serves no store {NAME!r}")
        if hello.get("version") != protocol.VERSION:
            raise WireError(
                f"{self._link.channel.peer} speaks version {hello.get('version')!r} of the store {NAME!r};"
                f" here is version {protocol.VERSION}: install one version of kvplug-host at both ends"
            )
        self.epoch = protocol.field(hello, "epoch", str)
        self._usage = protocol.usage_from(hello)
        try:
            self._pipe = self._link.open_pipe(protocol.PIPE, timeout=deadline.remaining())
        except (HandshakeError, TransportError) as e:  # both ends know
            _log.info("there is no pipe to the store of %s: %s", self._link.channel.peer, e)
        contact = protocol.field(hello, "memory", str)
        if contact and options.map and platform.machine() == "x86_64":
            self._mapping = self._mapped(context, hello, contact, deadline)
        _log.info("the store of %s is read: %s", self._link.channel.peer, self.route)

    @property
    def route(self) -> str:
        if self._mapping is not None:
            return "its memory is mapped"
        return f"over a pipe to {self._pipe.peer}" if self._pipe is not None else "not at all"

    def _mapped(self, context: StoreContext, hello: Any, contact: str, deadline: Deadline) -> Mapping | None:
        segment_bytes = protocol.number(hello, "segment_bytes", most=2**46)
        num_segments = protocol.number(hello, "num_segments", most=2**46 // max(1, segment_bytes))
        if not segment_bytes or not num_segments or segment_bytes % 4096:
            raise WireError(f"a store of {num_segments} segments of {segment_bytes} bytes")
        try:
            return Mapping(
                contact,
                context.credentials,
                protocol.field(hello, "ticket", bytes),
                segment_bytes=segment_bytes,
                num_segments=num_segments,
                deadline=deadline,
            )
        except KvplugError as e:
            _log.info("the memory of the store is not mapped, pages come over a pipe: %s", e)
            return None

    # -- jobs ----------------------------------------------------------------------------------

    def _deadline(self, timeout: Timeout) -> Deadline:
        return Deadline.after(timeout, self._timeout_s)

    def _check_open(self) -> None:
        if self._closing:
            raise ClosedError(f"the store {NAME!r} is closed")

    def submit_lookup(
        self, keys: Sequence[bytes], *, lease_s: float = 0.0, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> Job[Presence]:
        job: Job[Presence] = Job(len(keys), self._deadline(timeout))
        self._check_open()
        batches = protocol.key_batches(keys)
        question = Question(job, Presence.ABSENT, len(batches))

        def answered(at: int, count: int) -> Answer:
            def answer(message: Any) -> None:
                self._usage = protocol.usage_from(message)
                question.answer(at, protocol.presences_from(message, count))

            return answer

        self._ask(
            question,
            [
                ({"op": Op.LOOKUP, "keys": batch, "lease_s": float(lease_s)}, answered(*part))
                for batch, part in zip(batches, _parts(keys), strict=True)
            ],
        )
        return job

    def submit_remove(self, keys: Sequence[bytes] | None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Job[bool]:
        if keys is None:
            self._check_open()
            raise UnsupportedError("other programs keep pages in this store, too")
        job: Job[bool] = Job(len(keys), self._deadline(timeout))
        self._check_open()
        with self._lock:
            puts = list(self._puts)
        for put in puts:
            put.forget(keys)
        batches = protocol.key_batches(keys)
        question = Question(job, False, len(batches))

        def answered(at: int, count: int) -> Answer:
            def answer(message: Any) -> None:
                self._usage = protocol.usage_from(message)
                question.answer(at, [True] * count)

            return answer

        self._ask(
            question,
            [
                ({"op": Op.REMOVE, "keys": batch}, answered(*part))
                for batch, part in zip(batches, _parts(keys), strict=True)
            ],
        )
        return job

    def _ask(self, question: Question[Any], requests: Sequence[tuple[dict[str, Any], Answer]]) -> None:
        with self._lock:
            self._jobs.add(question)
        question.job.add_done_callback(lambda job: self._ended(question))
        try:
            question.begin(self._clock)
        except RuntimeError as e:
            _log.warning("the store %r needs another thread: %s", NAME, e)
            question.end()
        for message, answer in requests:
            self._request(next(self._numbers), question, message, answer)

    def _request(
        self, number: int, job: Question[Any] | Steps, message: dict[str, Any], answer: Answer
    ) -> None:
        """Send a request of that job. It ends if the store is gone."""
        with self._lock:
            gone = self._is_gone or self._closed
            if not gone:
                self._answers[number] = answer
                self._waiting[number] = job
        if gone or not self._outbox.send({**message, "id": number}):
            self._forget_request(number)
            self._end_for(job, MissReason.CLOSED if self._closed else MissReason.STORE_GONE)

    def _forget_request(self, number: int) -> None:
        with self._lock:
            self._answers.pop(number, None)
            self._waiting.pop(number, None)

    @staticmethod
    def _end_for(job: Question[Any] | Steps, reason: MissReason) -> None:
        if isinstance(job, Question):
            job.end()
        else:
            job.end(reason)

    def _ended(self, job: Question[Any] | Steps) -> None:
        with self._lock:
            self._jobs.discard(job)
            if isinstance(job, RemotePut):
                self._puts.discard(job)
            for number in [number for number, each in self._waiting.items() if each is job]:
                del self._waiting[number]
                if number not in self._piped:  # else pieces of it may be on their way
                    self._answers.pop(number, None)
            self._changed.notify_all()

    def submit_get(self, pages: PageRequest, *, timeout: Timeout = DEFAULT_TIMEOUT) -> GetJob:
        job = GetJob(len(pages.keys), pages.series.format.num_layers, self._deadline(timeout))
        self._check_open()
        if job.count > protocol.MAX_KEYS:
            raise ValueError(f"a request for {job.count} pages; the most are {protocol.MAX_KEYS}")
        if not job.count:
            job.set([])
        elif self._mapping is not None:
            self._get_mapped(job, pages, self._mapping)
        else:
            self._get_piped(job, pages)
        return job

    def _start(self, task: Steps) -> None:
        with self._lock:
            self._jobs.add(task)
            if isinstance(task, RemotePut):
                self._puts.add(task)
        try:
            task.begin(self._clock, self._ended)
        except RuntimeError as e:
            _log.warning("the store %r needs another thread: %s", NAME, e)
            task.end(MissReason.STORE_GONE)

    def _work(self, task: Steps) -> None:
        if not self._workers.add(task):
            task.end(MissReason.CLOSED if self._closed else MissReason.STORE_GONE)

    # -- gets from mapped memory ---------------------------------------------------------------

    def _get_mapped(self, job: GetJob, pages: PageRequest, mapping: Mapping) -> None:
        segments: set[int] = set()
        number = next(self._numbers)
        generations: list[int] = []
        words: list[int] = []

        def discard(index: int, reason: MissReason) -> None:
            self._wrong(pages.keys[index], reason, generations[index])

        get = SlotGet(
            job,
            pages,
            self.seal,
            discard=discard,
            settled=lambda: self._tell({"op": Op.DONE, "id": number}),
            again=self._work,
            prepare=lambda: self._map(mapping, segments, job.deadline),
        )

        def answer(message: Any) -> None:
            self._forget_request(number)
            places = protocol.places_from(message, job.count, mapping.segment_bytes, mapping.num_segments)
            for index, place in enumerate(places):
                if place is None:
                    get.miss(index, MissReason.ABSENT)
                else:
                    segments.add(place.offset // mapping.segment_bytes)
            generations.extend(place.generation if place else 0 for place in places)
            words.extend(place.offset + place.slot_bytes - 8 if place else 0 for place in places)

            def is_valid(numbers: Sequence[int]) -> list[bool]:
                return mapping.are([words[at] for at in numbers], [generations[at] for at in numbers])

            get.found(
                mapping.view,
                [place.offset if place else 0 for place in places],
                [place.header_bytes if place else 0 for place in places],
                [place.payload_bytes if place else 0 for place in places],
                is_valid,
            )
            if segments:
                self._work(get)
            else:
                get.end(None)

        self._start(get)
        lease_s = min(_READ_LEASE_S, max(0.0, job.deadline.remaining() or _READ_LEASE_S))
        message = {"op": Op.READ, "keys": b"".join(pages.keys), "lease_s": lease_s}
        self._request(number, get, message, answer)

    def _map(self, mapping: Mapping, segments: set[int], deadline: Deadline) -> None:
        """Have these segments mapped, in a worker."""
        for segment in sorted(segments):
            if mapping.lacks(segment):
                with mapping.lock:
                    if mapping.lacks(segment):
                        self._tell({"op": Op.SEGMENT, "number": segment})
                        try:
                            mapping.receive(segment, deadline)
                        except KvplugError as e:
                            self._unmap(e)
                            raise MemoryError("the memory of the store cannot be mapped") from e

    def _unmap(self, error: KvplugError) -> None:
        """The memory cannot be had: pages come over the pipe from now on."""
        with self._lock:
            mapping, self._mapping = self._mapping, None
        if mapping is not None:
            if not self._is_gone and not self._closed:
                _log.warning("the memory of the store is not mapped any more: %s", error)
            mapping.close()

    def _wrong(self, key: bytes, reason: MissReason, generation: int = 0) -> None:
        _log.warning("the store %r has given a wrong page (%s), which is removed", NAME, reason)
        self._tell({"op": Op.WRONG, "keys": key, "generation": generation})

    # -- gets over the pipe --------------------------------------------------------------------

    def _get_piped(self, job: GetJob, pages: PageRequest) -> None:
        number = next(self._numbers)
        get = PipedGet(
            job,
            pages,
            self.seal,
            lambda index, reason: self._wrong(pages.keys[index], reason),
            lambda: self._tell({"op": Op.CANCEL, "id": number}),
        )
        self._start(get)
        if self._pipe is None:
            get.end(MissReason.STORE_GONE)
            return
        if not self._listens_to_pipe():
            get.end(MissReason.STORE_GONE)
            return

        def answer(message: Any) -> None:
            self._forget_request(number)
            headers = protocol.field(message, "headers", list)
            if not all(type(each) is bytes for each in headers):
                raise WireError("a message of a store: headers are bytes")
            get.found(protocol.field(message, "found", bytes), headers)

        remaining = job.deadline.remaining()
        message = {
            "op": Op.FETCH,
            "keys": b"".join(pages.keys),
            "payload_bytes": pages.series.format.nbytes,
            "pieces": get.pieces.to_plain(),
            "timeout": protocol.MAX_FOR_S if remaining is None else remaining,
        }
        with self._lock:
            self._piped[number] = get
            self._answers[number] = answer
            self._waiting[number] = get
            gone = self._is_gone or self._closed or get.is_over
        if gone or not self._outbox.send({**message, "id": number}):
            self._piped.pop(number, None)
            self._forget_request(number)
            get.end(MissReason.CLOSED if self._closed else MissReason.STORE_GONE)

    def _listens_to_pipe(self) -> bool:
        with self._lock:
            if self._pipe_thread is None:
                thread = threading.Thread(target=self._receive_pages, name="kvplug-host-pages", daemon=True)
                try:
                    thread.start()
                except RuntimeError as e:
                    _log.warning("the store %r needs another thread: %s", NAME, e)
                    return False
                self._pipe_thread = thread
        return True

    def _receive_pages(self) -> None:
        import torch

        pipe = self._pipe
        assert pipe is not None
        stage = torch.empty(0, dtype=torch.uint8)
        try:
            while True:
                request, piece, rows, row_bytes = protocol.read_tag(pipe.recv_tensor(timeout=None))
                get = self._piped.get(request)
                if get is None:
                    if self._is_gone or self._closed:
                        return
                    raise WireError(f"a piece came of the request {request}, which is not under way")
                if not rows:
                    self._piped.pop(request, None)
                    get.all_sent()
                    continue
                sent = get.rows_of(piece, rows, row_bytes)
                if stage.numel() < rows * row_bytes:
                    stage = torch.empty(rows * row_bytes, dtype=torch.uint8)
                used = stage[: rows * row_bytes].view(rows, 1, row_bytes)
                pipe.recv_tensor(used, timeout=None)
                get.arrived(piece, sent, memory_of_writable(used), row_bytes)
        except (PeerGoneError, ClosedError):
            self._link.close()
        except KvplugError as e:
            self._fail(e)
        except Exception as e:
            _log.exception("receiving pages failed")
            self._fail(e)

    # -- puts ----------------------------------------------------------------------------------

    def submit_put(self, pages: PageRequest, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Job[PutReason | None]:
        job: Job[PutReason | None] = Job(len(pages.keys), self._deadline(timeout))
        self._check_open()
        put = RemotePut(
            job,
            pages,
            self.seal,
            ask=self._ask_to_put,
            send=self._send_rows,
            cancel=lambda request: self._tell({"op": Op.CANCEL, "id": request}),
            again=self._work,
        )
        self._start(put)
        if self._pipe is None:
            with put.lock:
                if not put.is_over:
                    put.results = [PutReason.READ_ONLY] * job.count
            put.end(None)
        else:
            put.ask()
        return job

    def _ask_to_put(self, put: RemotePut, numbers: range, wanted: Sequence[int]) -> int:
        pages = put.pages
        number = next(self._numbers)

        def answer(message: Any) -> None:
            if "wanted" in message:
                codes = protocol.field(message, "wanted", bytes)
                if len(codes) != len(wanted):
                    raise WireError(f"the store wants {len(codes)} of {len(wanted)} pages")
                put.answered(number, codes)
            else:
                self._forget_request(number)
                if message.get("usage") is not None:
                    self._usage = protocol.usage_from(message)
                put.kept(number, protocol.put_codes(message, len(wanted)))

        remaining = put.job.deadline.remaining()
        message = {
            "op": Op.PUT,
            "keys": b"".join(pages.keys[at] for at in wanted),
            "identities": [pages.identities[at] for at in wanted],
            "format": pages.series.format.to_plain(),
            "shard": pages.series.shard,
            "checksums": self.seal.checksums,
            "timeout": protocol.MAX_FOR_S if remaining is None else remaining,
        }
        self._request(number, put, message, answer)
        return number

    def _send_rows(
        self, request: int, first: int, rows: int, row_bytes: int, fill: Callable[[memoryview], None]
    ) -> None:
        """Send rows over the pipe, from memory that is used again."""
        pipe = self._pipe
        assert pipe is not None
        try:
            with self._sending:
                stage = self._stage(rows * row_bytes)[: rows * row_bytes].view(rows, 1, row_bytes)
                fill(memory_of_writable(stage))
                pipe.send_tensor(protocol.tag(request, first, rows, row_bytes), timeout=None)
                transfer = pipe.send_tensor(stage, timeout=None)
                self._stages.append((stage, transfer))
        except (PeerGoneError, ClosedError):
            self._link.close()
        except KvplugError as e:
            self._fail(e)

    def _stage(self, nbytes: int) -> Any:
        """Memory that is not being sent."""
        import torch

        if self._stages and (len(self._stages) >= _STAGES or self._is_sent(self._stages[0][1])):
            stage, transfer = self._stages.popleft()
            if transfer is not None:
                transfer.wait()
            flat = stage.view(-1)
            if flat.numel() >= nbytes:
                return flat
        return torch.empty(nbytes, dtype=torch.uint8)

    @staticmethod
    def _is_sent(transfer: Transfer | None) -> bool:
        return transfer is None or transfer.done()

    # -- at once -------------------------------------------------------------------------------

    def _tell(self, message: dict[str, Any]) -> None:
        """Send what has no answer. Where the store does not read, it is lost."""
        if not self._is_gone and not self._closed:
            self._outbox.send(message)

    def _tell_of_keys(self, op: str, keys: Sequence[bytes], **more: Any) -> None:
        self._check_open()
        for batch in protocol.key_batches(keys):
            self._tell({"op": op, "keys": batch, **more})

    def declare(self, series: Series, keys: Sequence[bytes], *, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        for_s = self._deadline(timeout).remaining()
        until = math.inf if for_s is None else for_s
        self._tell_of_keys(Op.DECLARE, keys, series=series.id, for_s=until)

    def withdraw(self, keys: Sequence[bytes]) -> None:
        self._tell_of_keys(Op.WITHDRAW, keys)

    def release(self, keys: Sequence[bytes]) -> None:
        self._tell_of_keys(Op.RELEASE, keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        self._tell_of_keys(Op.TOUCH, keys)

    def keys(self, series: Series) -> Sequence[bytes]:
        self._check_open()
        found: list[bytes] = []
        job: Job[bool] = Job(1, self._deadline(DEFAULT_TIMEOUT))
        question = Question(job, False, 1)
        number = next(self._numbers)

        def answer(message: Any) -> None:
            found.extend(protocol.keys_of(message, protocol.MAX_LISTED))
            if not protocol.field(message, "more", bool):
                self._forget_request(number)
                question.answer(0, [True])

        with self._lock:
            self._jobs.add(question)
            job.add_done_callback(lambda ended: self._ended(question))
            question.begin(self._clock)
        self._request(number, question, {"op": Op.KEYS, "series": series.id}, answer)
        if not job.wait()[0]:
            raise PeerGoneError("the store did not list its keys: it is gone, or does not answer")
        return found

    def usage(self) -> Usage:
        self._check_open()
        return self._usage

    @property
    def has_events(self) -> bool:
        return True

    def subscribe(self, listener: Callable[[PageEvent], None]) -> Callable[[], None]:
        self._check_open()
        number = next(self._numbers)

        def answer(message: Any) -> None:
            event = page_event_from_plain(message.get("event"))
            current = self._listeners.get(number)
            if current is not None:
                current(event)

        with self._lock:
            self._listeners[number] = listener
            gone = self._is_gone
            self._answers[number] = answer
        if gone or not self._outbox.send({"op": Op.SUBSCRIBE, "id": number}):
            listener(nothing_there())

        def end() -> None:
            if self._listeners.pop(number, None) is not None:
                self._forget_request(number)
                self._tell({"op": Op.UNSUBSCRIBE, "id": number})

        return end

    # -- what comes ----------------------------------------------------------------------------

    def _receive_all(self) -> None:
        channel = self._link.channel
        try:
            while True:
                message = channel.recv(timeout=None)
                answer = self._answers.get(protocol.number(message, "id"))
                if answer is not None:
                    answer(message)
        except (PeerGoneError, ClosedError) as e:
            _log.debug("the link to the store has ended: %s", e)
        except KvplugError as e:
            _log.warning("the store of %s is not used any more: %s", channel.peer, e)
        except Exception:
            _log.exception("an answer of the store was not understood: a fault of kvplug")
        self._lose()

    def _fail(self, error: BaseException) -> None:
        _log.warning("the store of %s is not used any more: %s", self._link.channel.peer, error)
        self._link.close()

    def _lose(self) -> None:
        """The store is gone: what was asked of it is a miss. Copies out of mapped memory go on."""
        with self._lock:
            self._is_gone = True
            waiting = {*self._waiting.values(), *self._puts, *self._piped.values()}
            self._answers.clear()
            self._waiting.clear()
            self._piped.clear()
            listeners = list(self._listeners.values())
            mapping, self._mapping = self._mapping, None
        reason = MissReason.CLOSED if self._closed else MissReason.STORE_GONE
        self._link.close()
        self._outbox.end()
        if self._pipe is not None:
            self._pipe.abort()
        if mapping is not None:
            mapping.close()
        for job in waiting:
            self._end_for(job, reason)
        if not self._closed:
            for listener in listeners:
                listener(nothing_there())
        self._on_lost()

    # -- the end -------------------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        return self._closing or self._is_gone

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        deadline = self._deadline(timeout)
        with self._lock:
            self._closing = True
            others = [job for job in self._jobs if not isinstance(job, RemotePut)]
        for job in others:
            self._end_for(job, MissReason.CLOSED)
        with self._lock:
            while self._puts and not self._closed:
                if not self._changed.wait(deadline.remaining()) and deadline.expired:
                    break
        self.abort()

    def abort(self) -> None:
        with self._lock:
            first = not self._closed
            self._closing = self._closed = True
            self._listeners.clear()
            jobs = list(self._jobs)
            self._changed.notify_all()
        for job in jobs:
            self._end_for(job, MissReason.CLOSED)
        if first:
            self._release()
            self._join(Deadline.after(_CLOSE_S))

    def _release(self) -> None:
        self._link.close()
        if self._pipe is not None:
            self._pipe.abort()
        if self._mapping is not None:
            self._mapping.close()
        self._workers.close()
        self._clock.close()

    def _join(self, deadline: Deadline) -> None:
        self._outbox.end()
        for thread in (self._thread, self._pipe_thread):
            if thread is not None and thread is not threading.current_thread():
                thread.join(deadline.remaining())
        self._workers.join(deadline)
        self._clock.join(deadline)
        self._mapping = None
        self._stages.clear()

    def _after_fork_in_child(self) -> None:
        self._closing = self._closed = True
        self._lock = threading.RLock()  # a thread of the parent may have held it
        self._changed = threading.Condition(self._lock)
        self._sending = threading.Lock()
        jobs, self._jobs, self._puts = self._jobs, set(), set()
        self._answers, self._waiting, self._listeners, self._piped = {}, {}, {}, {}
        self._workers.after_fork()
        self._clock.after_fork()
        self._outbox.after_fork()
        for job in jobs:
            job.after_fork()


def _parts(keys: Sequence[bytes]) -> list[tuple[int, int]]:
    """First key and number of keys of each batch."""
    return [(at, min(protocol.MAX_KEYS, len(keys) - at)) for at in range(0, len(keys), protocol.MAX_KEYS)]


def nothing_there() -> PagesSnapshot:
    """The event of a store that is gone."""
    return PagesSnapshot(epoch=uuid.uuid4().hex, seq=0, count=0)
