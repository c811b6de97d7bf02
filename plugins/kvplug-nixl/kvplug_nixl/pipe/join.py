"""How one proven connection becomes a pipe.

Each end says who its agent is, then reads 1 MiB of the other's memory: first the connecting end, then the
accepting one, while the other serves it. So both connections of UCX are up before the first message, each end
knows which lanes it has, and no end waits for longer than the deadline.
"""

from __future__ import annotations

import logging
import os
import re
import time
from typing import Any, Final

import attrs

from kvplug import KvplugError, PeerGoneError, ResourceExhaustedError, TimeoutError, TransportError
from kvplug.net.wire.checksum import digest
from kvplug.net.wire.tensors import memory_of
from kvplug.transport import Channel, Connection, Deadline, NamedExhaustion, Watch, WireError, peer_text
from kvplug_nixl.agent import Agent
from kvplug_nixl.pipe.fence import FENCE_BYTES, OwnFence, PeerFence
from kvplug_nixl.pipe.lanes import Lanes
from kvplug_nixl.pipe.options import NixlPipeOptions
from kvplug_nixl.pipe.pipe import NixlPipe, NixlPipeSettings

logger = logging.getLogger(__name__)

PURPOSE: Final = "pipe-nixl"
_PROBE_BYTES: Final = 1 << 20
_PROBES: Final = (3, 12)
"""How often it is read: at least, and while that seems slow. The best counts: the first one connects, and a
host may be busy."""
_HASH: Final = "xxh3_64"
_SERVE_S: Final = 200e-6
"""Seconds between two times in which an end serves the other's reads."""
_SHORTEST_SILENCE_S: Final = 0.05
_FAILURE_S: Final = 0.5
"""Seconds that the peer may take to read why there is no pipe."""
_NAME: Final = re.compile(r"kvplug-[0-9a-f]{16}")
_MAX_METADATA: Final = 1 << 20


@attrs.frozen(kw_only=True)
class Hello:
    """What each end says first."""

    name: str
    """Of its agent."""
    metadata: bytes
    fence: bytes
    fence_place: tuple[int, int]
    probe_place: tuple[int, int]
    probe_digest: bytes
    terms: Watch.Terms

    def encode(self) -> dict[str, Any]:
        """As a value of a channel."""
        return {
            "name": self.name,
            "metadata": self.metadata,
            "fence": self.fence,
            "fence_place": list(self.fence_place),
            "probe_place": list(self.probe_place),
            "probe_digest": self.probe_digest,
            "sees_death": self.terms.sees_death,
            "heartbeat_ms": self.terms.heartbeat_ms,
        }

    @classmethod
    def decode(cls, value: Any) -> Hello:
        """Raises WireError: it is none."""
        match value:
            case {
                "name": str(name),
                "metadata": bytes(metadata),
                "fence": bytes(fence),
                "fence_place": [int(fence_address), int(fence_number)],
                "probe_place": [int(probe_address), int(probe_number)],
                "probe_digest": bytes(probe_digest),
                "sees_death": bool(sees_death),
                "heartbeat_ms": int(heartbeat_ms),
            } if (
                _NAME.fullmatch(name)
                and 0 < len(metadata) <= _MAX_METADATA
                and len(fence) == FENCE_BYTES
                and 0 < fence_address < 1 << 62
                and 0 < probe_address < 1 << 62
                and min(fence_number, probe_number) >= 0
                and heartbeat_ms > 0
            ):
                return cls(
                    name=name,
                    metadata=metadata,
                    fence=fence,
                    fence_place=(fence_address, fence_number),
                    probe_place=(probe_address, probe_number),
                    probe_digest=probe_digest,
                    terms=Watch.Terms(sees_death, heartbeat_ms),
                )
        raise WireError("it does not join as this version does")


def make_pipe(
    connection: Connection,
    settings: NixlPipeSettings,
    options: NixlPipeOptions,
    deadline: Deadline,
    *,
    only_loopback: bool,
    accepted: bool,
) -> NixlPipe:
    """The pipe over a connection, which it owns from here on. ``accepted``: this is the listening end.

    Raises:
        TimeoutError, PeerGoneError, WireError: there is no pipe, and the connection is closed.
        TransportError: NIXL fails at one end, and why.
        ResourceExhaustedError: one of the two processes has no free descriptor, thread or memory for it.
    """
    given = connection
    try:
        with NamedExhaustion(f"making a pipe with {given.describe}"):
            sees_death = _sees_death(given)
            join = _Join(given, settings, options, deadline, sees_death=sees_death)
            return join.run(only_loopback=only_loopback, accepted=accepted)
    except ResourceExhaustedError as e:
        given.decline(e)
        raise
    finally:
        given.close()


def _sees_death(connection: Connection) -> bool:
    """Whether this end has a pidfd of the other's process. Raises PeerGoneError: it has ended."""
    pidfd = connection.peer.open_pidfd()
    if pidfd is not None:
        os.close(pidfd)
    return pidfd is not None


class _Join:
    """A pipe in the making."""

    def __init__(
        self,
        connection: Connection,
        settings: NixlPipeSettings,
        options: NixlPipeOptions,
        deadline: Deadline,
        *,
        sees_death: bool,
    ) -> None:
        self._peer = connection.describe
        self._settings = settings
        self._options = options
        self._deadline = deadline
        self._one_host = sees_death
        self._pid = connection.peer.pid if sees_death else None
        self._mode = options.error_handling
        if self._mode == "auto":
            self._mode = "none" if sees_death else "peer"
        self._terms = Watch.Terms.of(settings.heartbeat_timeout_s, sees_death=sees_death)
        self._channel = Channel(attrs.evolve(connection, sock=connection.sock.dup()), timeout_s=None)

    def run(self, *, only_loopback: bool, accepted: bool) -> NixlPipe:
        agent: Agent | None = None
        try:
            # The accepting end takes memory only when the connecting one has spoken.
            theirs = Hello.decode(self._receive()) if accepted else None
            agent = Agent(error_handling=self._mode, only_loopback=only_loopback, tls=self._options.tls)
            return self._exchange(agent, theirs)
        except BaseException as e:
            self._tell(e)
            if agent is not None:
                agent.close()
            self._channel.close()
            raise

    def _exchange(self, agent: Agent, theirs: Hello | None) -> NixlPipe:
        import torch

        fence = OwnFence(agent)
        probe = torch.frombuffer(bytearray(os.urandom(4096) * (_PROBE_BYTES // 4096)), dtype=torch.uint8)
        ((probe_address, _, probe_number),), probe_regions = agent.hold([probe])
        ours = Hello(
            name=agent.name,
            metadata=agent.metadata(),
            fence=fence.number,
            fence_place=fence.place,
            probe_place=(probe_address, probe_number),
            probe_digest=digest(_HASH, memory_of(probe)),
            terms=self._terms,
        )
        self._channel.send(ours.encode(), timeout=self._deadline.remaining())
        accepted = theirs is not None
        if theirs is None:
            theirs = Hello.decode(self._receive())
        agent.connect(theirs.metadata, theirs.name)
        if accepted:
            self._serve(agent)
        lanes = self._probe(agent, theirs)
        logger.info("the pipe to %s reads through %s, %.2f GB/s", self._peer, lanes.text, lanes.gb_per_s)
        self._done()
        self._serve(agent)
        if not accepted:
            self._done()
        agent.let_go(probe_regions)
        return NixlPipe(
            self._channel,
            agent,
            (fence, PeerFence(agent, theirs.fence, theirs.fence_place, self._pid)),
            lanes,
            self._settings,
            peer=self._peer,
            silence_s=self._terms.agreed(theirs.terms).silence_s(at_least_s=_SHORTEST_SILENCE_S),
        )

    # -- lanes -------------------------------------------------------------------------------------------

    def _probe(self, agent: Agent, theirs: Hello) -> Lanes:
        """Read the peer's memory."""
        import torch

        memory = torch.empty(_PROBE_BYTES, dtype=torch.uint8)
        local, regions = agent.hold([memory])
        remote = [(theirs.probe_place[0], _PROBE_BYTES, theirs.probe_place[1])]
        need_help, best = False, float("inf")
        expected = self._options.expected_gb_per_s
        fast_s = 10 * _PROBE_BYTES / (expected * 1e9) if expected else best
        for number in range(_PROBES[1]):
            if number >= _PROBES[0] and best <= fast_s:
                break
            began = time.perf_counter()
            read = agent.read(local, remote)
            while not read.is_done():
                need_help = True
                if self._deadline.expired:
                    raise TimeoutError(
                        f"the first read from {self._peer} did not end in time; UCX has the lanes"
                        f" {agent.lanes() or 'unknown'}"
                    )
                self._channel.check_not_declined()
                time.sleep(20e-6)
            best = min(best, time.perf_counter() - began)
        agent.let_go(regions)
        if digest(_HASH, memory_of(memory)) != theirs.probe_digest:
            raise TransportError(f"what NIXL read from {self._peer} is not what is there")
        text = agent.lanes()
        if text and "rma_am(" not in text:
            need_help = False
        return Lanes(
            text=text or "unknown",
            gb_per_s=_PROBE_BYTES / best / 1e9,
            need_help=need_help,
            error_handling=self._mode,
            tls=self._options.tls or os.environ.get("UCX_TLS", ""),
            one_host=self._one_host,
        )

    def _done(self) -> None:
        self._channel.send({"done": True}, timeout=self._deadline.remaining())

    def _serve(self, agent: Agent) -> None:
        """Serve the peer's reads until it says that they are done."""
        while True:
            try:
                if self._receive(_SERVE_S) != {"done": True}:
                    raise WireError(f"{self._peer} does not join as this version does")
                return
            except TimeoutError:
                if self._deadline.expired:
                    raise
                agent.progress()

    # -- frames ------------------------------------------------------------------------------------------

    def _receive(self, seconds: float | None = None) -> Any:
        left = self._deadline.remaining()
        if seconds is not None:
            left = seconds if left is None else min(seconds, left)
        value = self._channel.recv(left)
        if isinstance(value, dict) and "failed" in value:
            why = f"{self._peer} cannot be the other end of a pipe: {peer_text(value['failed'])}"
            if lacks := value.get("lacks"):
                raise ResourceExhaustedError(why, resource=peer_text(lacks))
            raise TransportError(why)
        return value

    def _tell(self, error: BaseException) -> None:
        """Tell the peer why there is no pipe."""
        shortage = NamedExhaustion.of(error, "making a pipe")
        told = shortage or error
        if isinstance(told, KvplugError) and not isinstance(told, PeerGoneError | WireError):
            lacks = shortage.resource if shortage is not None else ""
            try:
                self._channel.send({"failed": str(told), "lacks": lacks}, timeout=_FAILURE_S)
            except KvplugError as e:
                logger.debug("%s was not told why there is no pipe: %s", self._peer, e)
