"""The producer's worker: keeps blocks of finished prompts under leases, and sends them to decode engines.

There are two kinds of links. The scheduler side of a decode engine *claims* the blocks of a reference at
every worker before it promises them, renews its claims, and releases them. Its workers *pull*: they name a
claim and the units that they want, and this worker sends them. No other process reads the blocks, so a pull
whose claim is over is refused, and never gets the new contents of the blocks.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs

from kvplug import ClosedError, KvplugError, PeerGoneError
from kvplug.engine import (
    NO_BLOCK,
    BlockIds,
    BlockViews,
    ConnectorContext,
    LayoutError,
    PeerLink,
)
from kvplug.transport import (
    BackgroundThread,
    Deadline,
    DeviceMark,
    Pipe,
    WireError,
    close_after_fork,
)
from kvplug_p2p.reference import Reference, verified
from kvplug_p2p.views import HASHED_TOGETHER, CacheViews, OwnStream, hash_of, hash_rows

_log = logging.getLogger(__name__)

ASK: Final = "p2p-ask"
"""The purpose of links from scheduler sides."""
PULL: Final = "p2p-pull"
"""The purpose of links from workers."""
PIPE: Final = "kv"
"""The label of a worker link's pipe."""
_CLOSE_S: Final = 2.0
_SEND_S: Final = 10.0
"""Timeout for an answer of a few bytes."""
_EARLY_SEND_S: Final = 0.05
"""Timeout for an answer that the engine's thread sends."""
_MAX_SERVED: Final = 1024
_MAX_CLAIMS: Final = 1 << 16
"""The most claims on one hold, and the most early claims."""


ClaimKey = tuple[str, str]
"""The decode engine's id, and the claim's name in it."""


@attrs.define(eq=False, kw_only=True)
class Hold:
    """Blocks of one finished request."""

    request_id: str
    lease: int
    block_ids: BlockIds
    traceparent: str
    end_s: float
    """When the lease ends unless it is renewed, by ``time.monotonic``."""
    written: DeviceMark
    """A mark that the device passes when it has computed the KV."""
    began: float
    claims: set[ClaimKey] = attrs.field(factory=set)
    """Claims that have not been released."""
    hashes: dict[tuple[int, int], dict[tuple[int, ...], bytes]] | None = None
    """The hashes of :func:`hash_rows` by group and layer, once they are computed."""
    num_sending: int = 0
    is_over: bool = False
    """No new send begins; the engine gets the blocks back once the current sends end."""
    reason: str = "other"
    """Why it is over, for the statistics if nothing was sent."""
    sent_bytes: int = 0


class Lender:
    """The holds of one worker, and the links of decode engines that may claim them. Thread-safe."""

    def __init__(self, context: ConnectorContext) -> None:
        self._context = context
        self._lease_s: float = context.options.lease_s
        self._lock = threading.Lock()
        self._key = b""
        self._epoch = ""
        self._holds: dict[str, Hold] = {}
        """Holds by request. A hold that is over stays here until its blocks have been sent."""
        self._claims: dict[ClaimKey, tuple[PeerLink, Hold]] = {}
        """For each claim its hold, and the link that asked last. The claim ends with that link."""
        self._ended: set[str] = set()
        self._latest_lease = 0
        self._num_resets = 0
        """Twice the number of resets, plus one if something was handed off since the latest one."""
        self._early: dict[ClaimKey, tuple[PeerLink, Reference]] = {}
        """Claims on blocks handed off in a step that has not reached this worker yet."""
        self._served: set[PeerLink] = set()
        self._pipes: dict[PeerLink, Pipe] = {}
        self._sending: dict[PeerLink, Hold] = {}
        self._closed = False
        self._views: CacheViews | None = None
        close_after_fork(self)
        self._checksum = next(iter(context.checksums), None)
        self._unhashed: queue.SimpleQueue[Hold | None] = queue.SimpleQueue()
        self._hasher = BackgroundThread(
            self._hash_all, name="kvplug-p2p-hash", stop=lambda: self._unhashed.put(None)
        )
        self._hasher.start()
        self._server = context.peers.serve(self._serve, max_served=_MAX_SERVED)
        self.contact = self._server.contact
        """The contact for decode engines."""

    def _after_fork_in_child(self) -> None:
        self._closed = True
        self._holds, self._claims, self._served = {}, {}, set()

    @property
    def num_held(self) -> int:
        """Number of requests whose blocks are kept."""
        return len(self._holds)

    # -- called by the engine's thread ---------------------------------------------------------

    def register(self, views: CacheViews) -> None:
        """Set the cache to send from."""
        self._views = views

    def begin(self, epoch: str, key: bytes) -> None:
        """Set the epoch, and the key that signs its references."""
        self._epoch, self._key = epoch, key

    def hold(self, request_id: str, lease: int, block_ids: BlockIds, traceparent: str = "") -> None:
        """Keep these blocks. The engine's thread has already queued the kernels that compute their KV."""
        assert self._views is not None
        now = time.monotonic()
        hold = Hold(
            request_id=request_id,
            lease=lease,
            block_ids=block_ids,
            traceparent=traceparent,
            end_s=now + self._lease_s,
            written=DeviceMark(self._views.device),
            began=now,
        )
        if self._checksum is not None and self._views.device.type == "cpu":
            self._unhashed.put(hold)
        is_first = not self._num_resets % 2
        with self._lock:
            self._num_resets += is_first
            self._holds[request_id] = hold
            self._latest_lease = lease
            early, self._early = self._early, {}
            granted = [
                (link, claim, self._grant(link, claim, reference))
                for claim, (link, reference) in early.items()
            ]
        for link, (_, key), reason in granted:
            with contextlib.suppress(KvplugError):  # the reader has left, or does not receive
                self._answer_claim(link, key, reason, timeout_s=_EARLY_SEND_S)
        if is_first:
            self._announce()

    def revoke(self, request_id: str) -> None:
        """Withdraw the request's blocks: their KV is wrong."""
        with self._lock:
            if (hold := self._holds.get(request_id)) is not None:
                self._finish(hold, "corrupt")

    def reset(self) -> None:
        """Withdraw everything that was computed before a reset, and abort the sends that are under way."""
        with self._lock:
            for hold in list(self._holds.values()):
                self._finish(hold, "cancelled")
            self._num_resets += self._num_resets % 2
            sending = list(self._sending)
        for link in sending:
            self._drop(link)
        self._announce()

    def _announce(self) -> None:
        """Tell decode engines whether there is KV from before a reset: their own reset depends on it."""
        with self._lock:
            asking = [link for link in self._served if link.agreement.remote.purpose == ASK]
        for link in asking:
            try:
                link.channel.send({"resets": self._num_resets}, timeout=_EARLY_SEND_S)
            except KvplugError:  # it gets the count when it connects again
                link.close()

    def take_ended(self) -> frozenset[str]:
        """Return the requests whose blocks went back to the engine since the last call."""
        now, stuck = time.monotonic(), []
        with self._lock:
            for hold in list(self._holds.values()):
                if now >= hold.end_s:
                    self._finish(hold, "expired")
                    stuck += [link for link, other in self._sending.items() if other is hold]
            ended, self._ended = frozenset(self._ended), set()
        for link in stuck:
            _log.warning("%s: the lease ended during a send", link.agreement.remote.engine_id)
            self._drop(link)
        return ended

    def _finish(self, hold: Hold, reason: str) -> None:
        """End the hold: no new send begins. Needs the lock."""
        if not hold.is_over:
            hold.is_over = True
            for claim in hold.claims:
                self._claims.pop(claim, None)
            hold.claims.clear()
            hold.reason = reason
        if not hold.num_sending and self._holds.get(hold.request_id) is hold:
            if not hold.sent_bytes:
                self._context.stats.fail("save", hold.reason)
            self._context.spans.record(
                "hold",
                hold.request_id,
                hold.began,
                parent=hold.traceparent,
                reason="" if hold.sent_bytes else hold.reason,
                num_bytes=hold.sent_bytes,
            )
            del self._holds[hold.request_id]
            self._ended.add(hold.request_id)

    # -- links ---------------------------------------------------------------------------------

    def _serve(self, link: PeerLink, _: Deadline) -> None:
        purpose = link.agreement.remote.purpose
        serve: Callable[[PeerLink], None] | None = {ASK: self._answer, PULL: self._send_pulls}.get(purpose)
        if serve is None:
            raise WireError(f"connector 'p2p' does not know the link purpose {purpose!r}")
        with self._lock:
            if self._closed:
                return
            self._served.add(link)
        try:
            serve(link)
        except (ClosedError, PeerGoneError) as e:
            _log.debug("%s has left: %s", link.agreement.remote.engine_id, e)
        finally:
            self._drop(link)
            self._forget(link)

    def _drop(self, link: PeerLink) -> None:
        pipe = self._pipes.get(link)
        if pipe is not None:
            pipe.abort()
        link.close()

    def _forget(self, link: PeerLink) -> None:
        """End the claims of a lost link."""
        with self._lock:
            self._served.discard(link)
            self._pipes.pop(link, None)
            for claim in [claim for claim, (of, _) in self._claims.items() if of is link]:
                self._release(claim, "peer_gone")
            self._early = {claim: early for claim, early in self._early.items() if early[0] is not link}

    def _release(self, claim: ClaimKey, reason: str = "cancelled") -> None:
        """Release a claim; blocks without a claim go back to the engine. Needs the lock."""
        self._early.pop(claim, None)
        _, hold = self._claims.pop(claim, (None, None))
        if hold is not None:
            hold.claims.discard(claim)
            if not hold.claims:
                self._finish(hold, reason)

    # -- claims --------------------------------------------------------------------------------

    def _answer(self, link: PeerLink) -> None:
        """Answer one scheduler side until it leaves."""
        remote = link.agreement.remote
        link.channel.send({"resets": self._num_resets}, timeout=_SEND_S)
        while True:
            message = link.channel.recv(timeout=None)
            if type(message) is not dict:
                raise WireError("a scheduler side sent a malformed message")
            if type(message.get("claim")) is str and type(message.get("reference")) is bytes:
                reason = self._claim(link, message["claim"], message["reference"])
                self._answer_claim(link, message["claim"], reason, timeout_s=_SEND_S)
            elif type(message.get("release")) is str:
                with self._lock:
                    self._release((remote.engine_id, message["release"]))
            elif message == {"renew": True}:
                self._renew(link)
            else:
                raise WireError("a scheduler side sent a malformed message")

    def _answer_claim(self, link: PeerLink, key: str, reason: str | None, *, timeout_s: float) -> None:
        if reason is None:
            return
        answer = {"claim": key, "refused": reason, "lease_s": self._lease_s}
        link.channel.send(answer, timeout=timeout_s)
        if reason:
            _log.debug("refused a reference from %s: %s", link.agreement.remote.engine_id, reason)

    def _claim(self, link: PeerLink, key: str, text: bytes) -> str | None:
        """Return why the reference is refused; empty: the claim is granted; ``None``: answer later."""
        reference = verified(text, self._key) if self._key else None
        if reference is None:
            return "forged"
        if reference.epoch != self._epoch:
            return "gone"
        if reference.expires_ms <= time.time() * 1000:
            return "expired"
        with self._lock:
            return self._grant(link, (link.agreement.remote.engine_id, key), reference)

    def _grant(self, link: PeerLink, claim: ClaimKey, reference: Reference) -> str | None:
        """Like :meth:`_claim`, for a verified reference. Needs the lock."""
        if reference.lease > self._latest_lease and len(self._early) < _MAX_CLAIMS:
            self._early[claim] = link, reference
            return None
        hold = self._holds.get(reference.request_id)
        if hold is None or hold.is_over or hold.lease != reference.lease:
            return "gone"
        if self._claims.get(claim, (link, hold))[1] is not hold or len(hold.claims) >= _MAX_CLAIMS:
            return "refused"
        self._claims[claim] = link, hold
        hold.claims.add(claim)
        hold.end_s = time.monotonic() + self._lease_s
        return ""

    def _renew(self, link: PeerLink) -> None:
        with self._lock:
            end_s = time.monotonic() + self._lease_s
            for of, hold in self._claims.values():
                if of is link:
                    hold.end_s = max(hold.end_s, end_s)

    # -- pulls ---------------------------------------------------------------------------------

    def _send_pulls(self, link: PeerLink) -> None:
        """Send what one worker asks for until it leaves."""
        config, views = self._context.config, self._views
        pipe = link.open_pipe(PIPE, device=config.device)
        with self._lock:
            self._pipes[link] = pipe
            closed = self._closed
        if closed or views is None:
            raise ClosedError("this worker was shut down, or has no registered cache")
        with contextlib.closing(OwnStream(views.device)) as stream:
            while True:
                message = link.channel.recv(timeout=None)
                hold = self._hold_of(link, message)
                if hold is None:
                    link.channel.send({"refused": "gone"}, timeout=_SEND_S)
                    continue
                try:
                    self._send(link, pipe, hold, message, stream)
                finally:
                    with self._lock:
                        self._sending.pop(link, None)
                        hold.num_sending -= 1
                        if hold.is_over:
                            self._finish(hold, hold.reason)

    def _hold_of(self, link: PeerLink, message: Any) -> Hold | None:
        """Find the hold that a pull names, and count the send. ``None``: the claim is over.

        Raises:
            WireError: the message is not a pull.
        """
        if type(message) is not dict or type(message.get("claim")) is not str:
            raise WireError("a worker sent a malformed pull")
        with self._lock:
            _, hold = self._claims.get((link.agreement.remote.engine_id, message["claim"]), (None, None))
            if hold is not None:
                hold.num_sending += 1
                hold.end_s = time.monotonic() + self._lease_s
                self._sending[link] = hold
            return hold

    def _send(
        self, link: PeerLink, pipe: Pipe, hold: Hold, message: Mapping[str, Any], stream: OwnStream
    ) -> None:
        """
        Raises:
            WireError: the pull is malformed, or asks for blocks of another request.
        """
        views = self._views
        assert views is not None
        try:
            unit, (first, count) = message["unit"], message["heads"]
            wanted = [
                (group, views.of(group, unit, first, count, numbers), numbers)
                for group, numbers in enumerate(message["units"])
                if numbers
            ]
            for group, _, numbers in wanted:
                each = self._context.cache.groups[group].block_size // unit
                if not {number // each for number in numbers} <= {*hold.block_ids[group]}:
                    raise WireError("a pull asks for blocks that do not belong to its request")
        except (KeyError, TypeError, ValueError, IndexError, LayoutError) as e:
            raise WireError(f"a worker sent a malformed pull: {e}") from e
        checksum = link.agreement.checksum if views.device.type == "cpu" else None
        answer: dict[str, Any] = {"sending": True}
        if checksum:
            answer["hashes"] = [
                self._hashes(hold, checksum, group, (unit, first, count), numbers, found, rows)
                for group, (found, rows), numbers in wanted
            ]
        link.channel.send(answer, timeout=_SEND_S)
        began, nbytes = time.perf_counter(), 0
        with stream.after(hold.written):
            transfers = [pipe.send_blocks(found, rows, timeout=None) for _, (found, rows), _ in wanted]
        for transfer in transfers:
            transfer.wait(timeout=None)
            nbytes += transfer.nbytes
        self._context.spans.record(
            "send",
            hold.request_id,
            began,
            parent=hold.traceparent,
            num_bytes=nbytes,
            peer=link.agreement.remote.engine_id,
        )
        with self._lock:
            is_first, hold.sent_bytes = not hold.sent_bytes, hold.sent_bytes + nbytes
            hold.end_s = time.monotonic() + self._lease_s
        if is_first:
            self._context.stats.record("save", nbytes, time.perf_counter() - began)

    # -- hashes --------------------------------------------------------------------------------

    def _hash_all(self) -> None:
        """Hash blocks ahead of the pulls, which usually come some time later."""
        while (hold := self._unhashed.get()) is not None:
            views, name = self._views, self._checksum
            assert views is not None and name is not None
            made: dict[tuple[int, int], dict[tuple[int, ...], bytes]] = {}
            for group, table in enumerate(hold.block_ids):
                size = self._context.cache.groups[group].block_size
                blocks = [block for block in table if block != NO_BLOCK]
                found, rows = views.of(group, size, 0, views.num_heads(group), blocks)
                for layer in range(0 if hold.is_over else len(found)):
                    made[group, layer] = hash_rows(name, found, layer, rows)
            if not hold.is_over:  # otherwise some are missing
                hold.hashes = made

    def _hashes(
        self,
        hold: Hold,
        name: str,
        group: int,
        part: tuple[int, int, int],
        numbers: Sequence[int],
        found: BlockViews,
        rows: Sequence[int],
    ) -> tuple[int, list[bytes]]:
        """Return how many rows the first hash covers, and the hash of each layer.

        ``part``: tokens in a unit, the first head, and the number of heads.
        """
        views, first = self._views, HASHED_TOGETHER
        assert views is not None
        known = hold.hashes if name == self._checksum else None
        if part != (self._context.cache.groups[group].block_size, 0, views.num_heads(group)):
            known = None
        if known is not None:  # divide where the request's own rows were divided
            blocks = [block for block in hold.block_ids[group] if block != NO_BLOCK]
            first -= blocks.index(numbers[0]) % HASHED_TOGETHER
        hashes = []
        for layer in range(len(found)):
            of_rows = hash_rows(name, found, layer, rows, first, known[group, layer] if known else None)
            hashes.append(hash_of(name, of_rows.values()))
        return first, hashes

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Close all links. Idempotent."""
        with self._lock:
            self._closed = True
            served = list(self._served)
        self._unhashed.put(None)
        for link in served:
            self._drop(link)
        self._server.close()
        self._hasher.join(_CLOSE_S)
