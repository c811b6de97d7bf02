"""The consumer's scheduler side: its connections to producers, and its claims on their blocks."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Mapping
from typing import Final

import attrs

from kvplug import ClosedError, HandshakeError, KvplugError, ResourceExhaustedError, TimeoutError
from kvplug.engine import ConnectorContext, Engine, JoinedEngines, PeerLink, PersistentLink, Role, reason_of
from kvplug.transport import Deadline, NamedExhaustion, WireError, close_after_fork
from kvplug_p2p.lender import ASK
from kvplug_p2p.reference import Reference

_log = logging.getLogger(__name__)

PeerAddress = str | Mapping[int, str] | None
"""As ``Peers.connect`` takes it."""

_FIRST_LEASE_S: Final = 10.0
"""What a lease is taken for until the producer has sent its length."""
_SEND_S: Final = 0.2
_RENEWALS_PER_LEASE: Final = 3
_MOST_NAMED: Final = 64
"""Limit on producers that requests named and a pattern of ``allowed`` permits."""


@attrs.define(eq=False)
class Claim:
    """One request's claim on the blocks of a reference."""

    key: str
    """Its name, unique in this engine."""
    reference: Reference
    text: bytes = attrs.field(repr=False)
    expires: Deadline
    calls_wait: Deadline
    """Until when calls about it wait for the producer's answer, in total."""
    made_at: float = attrs.field(factory=time.perf_counter)
    engine: ProducerEngine | None = None
    """The producer that it was sent to."""
    unanswered: set[int] = attrs.field(factory=set)
    """Ranks of the producer's workers that have not answered."""
    refused: str = ""
    """Why it was refused; empty: it was not."""
    pull_ends: Deadline | None = None
    """By when every worker that makes progress has ended its pull; ``None``: no pull is planned."""

    @property
    def is_granted(self) -> bool:
        """Whether every worker of the producer keeps the blocks for it."""
        return self.engine is not None and not self.unanswered and not self.refused


class _WorkerLink(PersistentLink):
    """The link to one worker of a producer. Its thread receives answers, and renews claims."""

    def __init__(self, engine: ProducerEngine, context: ConnectorContext, rank: int) -> None:
        name = f"{engine.name}, worker {rank}"
        super().__init__(context, rank, ASK, name=name, peer=engine.peer, thread="kvplug-p2p-ask")
        self._engine = engine
        self.link: PeerLink | None = None
        self.error: Exception | None = None
        """Why the latest attempt to connect failed."""
        self.num_resets = 0
        """The worker's count of resets; odd if it may still hand off KV from before a reset."""
        self._lease_s = _FIRST_LEASE_S

    def send(self, message: Mapping[str, object]) -> bool:
        """Return whether the message was sent."""
        link = self.link
        if link is None:
            return False
        try:
            link.channel.send(message, timeout=_SEND_S)
        except KvplugError as e:
            _log.debug("cannot send to %s: %s", self._engine.name, e)
            link.close()
            return False
        return True

    def _lose(self, error: Exception | None) -> None:
        self._engine.changed(self, None, error)

    def _follow(self, link: PeerLink) -> None:
        self._engine.changed(self, link, None)
        renewal = Deadline.after(self._lease_s / _RENEWALS_PER_LEASE)
        while not self._closed.is_set():
            answer = None
            with contextlib.suppress(TimeoutError):
                answer = link.channel.recv(timeout=renewal.remaining())
            if renewal.expired:
                if self._engine.keeps_claims():
                    link.channel.send({"renew": True}, timeout=_SEND_S)
                renewal = Deadline.after(self._lease_s / _RENEWALS_PER_LEASE)
            if answer is None:
                continue
            if type(answer) is dict and type(answer.get("resets")) is int:
                self.num_resets = max(self.num_resets, answer["resets"])
                continue
            if type(answer) is not dict or type(answer.get("claim")) is not str:
                raise WireError(f"{self._engine.name} sent a malformed answer")
            refused, lease_s = answer.get("refused"), answer.get("lease_s")
            if type(refused) is not str or type(lease_s) is not float or not lease_s > 0:
                raise WireError(f"{self._engine.name} sent a malformed answer")
            if lease_s != self._lease_s:
                self._lease_s = lease_s
                renewal = Deadline.after(lease_s / _RENEWALS_PER_LEASE)
            self._engine.answered(self._rank, answer["claim"], refused)


class ProducerEngine:
    """One producer: links to all of its workers."""

    def __init__(self, context: ConnectorContext, name: str, peer: PeerAddress) -> None:
        self._context = context
        self.name = name
        self.peer = dict(peer) if isinstance(peer, Mapping) else peer
        """Its address, as plain values."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._workers = [_WorkerLink(self, context, 0)]
        self._claims: dict[str, Claim] = {}
        self._closed = False
        self._engine_hangs = Deadline.after(context.config.timeout_s)
        """When claims are given up, unless this engine makes a step before."""
        close_after_fork(self)
        with NamedExhaustion(f"connecting to {name}"):
            self._workers[0].start()

    def _after_fork_in_child(self) -> None:
        self._closed, self._workers, self._claims = True, [], {}

    # -- called by the links' threads ----------------------------------------------------------

    def changed(self, worker: _WorkerLink, link: PeerLink | None, error: Exception | None) -> None:
        """Note that a link has come up, or that it is lost and its claims with it."""
        with self._lock:
            if link is not None or worker.link is not None:
                worker.num_resets = -1  # unknown: it may hand off KV while it is disconnected
            worker.link, worker.error = link, error
            if link is not None and worker is self._workers[0]:
                facts = link.agreement.remote.engine
                size = 1 if facts is None else facts.world_size
                for other in self._workers[size:]:  # it has restarted with fewer workers
                    other.end()
                del self._workers[size:]
                for rank in range(len(self._workers), size):
                    other = _WorkerLink(self, self._context, rank)
                    self._workers.append(other)
                    other.start()
            if link is None and worker in self._workers:
                for claim in self._claims.values():
                    claim.refused = claim.refused or ("peer_gone" if error is None else reason_of(error))
            self._changed.notify_all()

    def answered(self, rank: int, key: str, refused: str) -> None:
        with self._lock:
            claim = self._claims.get(key)
            if claim is not None:
                claim.unanswered.discard(rank)
                claim.refused = claim.refused or refused
                self._changed.notify_all()

    def keeps_claims(self) -> bool:
        """Return whether there are claims to renew. Give up claims if this engine or one of its workers
        hangs: the scheduler's thread may be waiting for that worker."""
        with self._lock:
            hangs = self._engine_hangs.expired
            hung = [
                claim
                for claim in self._claims.values()
                if (hangs if claim.pull_ends is None else claim.pull_ends.expired)
            ]
            for claim in hung:
                claim.refused = claim.refused or "stalled"
        for claim in hung:
            _log.warning("%s: giving up claim %s: no worker here pulls for it", self.name, claim.key)
            self.release(claim)
        return bool(self._claims)

    # -- called by the scheduler ---------------------------------------------------------------

    @property
    def engine_id(self) -> str:
        """The producer's engine id; empty while it is not connected."""
        link = self.link
        return "" if link is None else link.agreement.remote.engine_id

    @property
    def link(self) -> PeerLink | None:
        """The link to worker 0."""
        return self._workers[0].link if self._workers else None

    @property
    def has_failed(self) -> bool:
        """Whether the latest attempt to connect failed."""
        return self.link is None and (not self._workers or self._workers[0].error is not None)

    @property
    def has_refused(self) -> bool:
        """Whether the latest handshake with one of its workers failed."""
        return any(isinstance(worker.error, HandshakeError) for worker in self._workers)

    @property
    def is_cleared(self) -> bool:
        """Whether it has handed off nothing since its last reset or start, or was never connected."""
        return not any(worker.num_resets % 2 for worker in self._workers)

    @property
    def is_up(self) -> bool:
        """Whether all its workers are connected."""
        workers = self._workers
        link = self.link
        if link is None or (facts := link.agreement.remote.engine) is None:
            return False
        return len(workers) >= facts.world_size and all(worker.link is not None for worker in workers)

    def note_step(self) -> None:
        """Note that the scheduler makes a step: this engine does not hang."""
        self._engine_hangs = Deadline.after(self._context.config.timeout_s)

    def send_claim(self, claim: Claim) -> None:
        """Send the claim to every worker."""
        with self._lock:
            claim.engine = self
            self.note_step()
            self._claims[claim.key] = claim
            claim.unanswered = set(range(len(self._workers)))
        for worker in self._workers:
            if not worker.send({"claim": claim.key, "reference": claim.text}):
                claim.refused = claim.refused or "peer_gone"

    def wait_for(self, claim: Claim) -> None:
        """Wait until the claim is answered, or until ``claim.calls_wait``."""
        with self._lock:
            while claim.unanswered and not claim.refused:
                if not self._changed.wait(claim.calls_wait.remaining()):
                    return

    def release(self, claim: Claim) -> None:
        """Tell the workers that the claim's blocks are no longer needed."""
        with self._lock:
            known = self._claims.pop(claim.key, None)
        if known is not None:
            for worker in self._workers:
                worker.send({"release": claim.key})

    def wait_until_up(self, deadline: Deadline) -> None:
        """
        Raises:
            TimeoutError: names the producer and its address.
            HandshakeError, AuthenticationError: the producer is refused, or refuses this engine.
        """
        with self._lock:
            while not self.is_up:
                if self._closed:
                    raise ClosedError("this connector was shut down")
                errors = [worker.error for worker in self._workers if worker.error is not None]
                for error in errors:
                    if isinstance(error, HandshakeError | PermissionError | ResourceExhaustedError):
                        raise error
                if not self._changed.wait(deadline.remaining()) and deadline.expired:
                    why = f": {errors[0]}" if errors else ""
                    raise TimeoutError(f"{self.name} was not reached in time{why}")

    def end(self) -> None:
        """End the links without waiting for their threads."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
            workers = list(self._workers)
        for worker in workers:
            worker.end()

    def close(self) -> None:
        self.end()
        for worker in self._workers:
            worker.close()


def fixed_addresses(context: ConnectorContext) -> list[str | None]:
    """Addresses of the producers that the config names; ``None``: the config's host and port."""
    config = context.config
    addresses: list[str | None] = [*config.peer_addresses]
    if addresses or config.directory is not None or context.options.allowed:
        return addresses
    return [None] if config.role is Role.CONSUMER else []


def matches(pattern: str, address: str) -> bool:
    """Whether the address matches: ``*`` matches letters, digits, hyphens and underscores.

    It does not match a dot, colon or number sign: a client chooses the address, and could add its own domain
    or another port.
    """
    return re.fullmatch(r"[\w-]*".join(map(re.escape, pattern.split("*"))), address, re.ASCII) is not None


class ProducerEngines:
    """The producers in the config's ``peers`` and directory, and those that ``allowed`` permits.

    A request cannot add others.
    """

    def __init__(self, context: ConnectorContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._closed = False
        self._fixed: dict[str, ProducerEngine] = {}
        self._listed = JoinedEngines(context, self._join)
        self._named: dict[str, ProducerEngine] = {}
        try:
            for address in fixed_addresses(context):
                name = f"the producer at {address or context.config.control_address(0)}"
                self._fixed[name] = ProducerEngine(context, name, address)
            self._listed.follow()
        except BaseException:
            self.close()
            raise

    def _join(self, engine: Engine) -> ProducerEngine:
        return ProducerEngine(self._context, f"producer {engine.engine_id}", engine.contacts)

    def all(self) -> list[ProducerEngine]:
        """Every known producer."""
        with self._lock:
            return [*self._fixed.values(), *self._listed.all(), *self._named.values()]

    def find(self, reference: Reference) -> ProducerEngine | None:
        """Find the producer of the reference; ``None`` if it is unknown, or not connected yet.

        Starts to connect if a pattern of ``allowed`` matches its address.
        """
        known = self.all()
        for engine in known:
            if engine.engine_id == reference.engine_id:
                return engine
        address = reference.address
        if not any(matches(pattern, address) for pattern in self._context.options.allowed):
            return None
        with self._lock:
            if address not in self._named and not self._closed:
                if len(self._named) >= _MOST_NAMED:
                    gone = next((name for name, each in self._named.items() if each.has_failed), None)
                    if gone is None:
                        return None
                    self._named.pop(gone).end()
                self._named[address] = ProducerEngine(self._context, f"the producer at {address}", address)
        return None

    def may_come(self, reference: Reference) -> bool:
        """Whether a producer that is not connected yet may have made the reference."""
        return any(not each.engine_id and not each.has_failed for each in self.all())

    @property
    def have_answered(self) -> bool:
        """Whether every known producer is connected, or has refused the handshake."""
        return all(each.is_up or each.has_refused for each in self.all())

    def wait_until_up(self, deadline: Deadline) -> None:
        """Raises what :meth:`ProducerEngine.wait_until_up` and ``Members.wait_until_known`` raise."""
        self._listed.wait_until_known(deadline)
        for producer in self.all():
            producer.wait_until_up(deadline)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._listed.close()
        every = self.all()
        for producer in every:
            producer.end()
        for producer in every:
            producer.close()
