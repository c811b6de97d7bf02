"""How one proven connection becomes a pipe.

Each end describes its agent, then reads 1 MiB of the other's memory: first the connecting end, then the
accepting one, while the other serves it. So both connections of UCX are up before the first message, each end
knows which lanes it has and how fast they are, and no end waits for longer than the deadline.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Final

import attrs
from attrs.validators import ge, gt, lt, matches_re, max_len, min_len

from kvplug import TimeoutError, TransportError
from kvplug.net.wire.checksum import digest
from kvplug.net.wire.tensors import memory_of
from kvplug.transport import Connection, Deadline, OfferPipe, WireError
from kvplug_nixl.agent import Agent
from kvplug_nixl.pipe.fence import FENCE_BYTES, OwnFence, PeerFence
from kvplug_nixl.pipe.options import NixlPipeOptions
from kvplug_nixl.pipe.pipe import Lanes, NixlPipe, NixlPipeSettings

logger = logging.getLogger(__name__)

PURPOSE: Final = "pipe-nixl"
_PROBE_BYTES: Final = 1 << 20
_PROBES: Final = (3, 12)
"""How often it is read: at least, and at most while the reads seem slow. The fastest read counts: the first
one connects, and a host may be busy."""
_HASH: Final = "xxh3_64"
_SERVE_S: Final = 200e-6
"""Seconds between two calls that serve the other end's reads."""
_MAX_METADATA: Final = 1 << 20
_ADDRESS: Final = [gt(0), lt(1 << 62)]


@attrs.frozen(kw_only=True)
class Hello:
    """One end's agent, and two places in its memory, each with the number that NIXL knows it by."""

    name: str = attrs.field(validator=matches_re("kvplug-[0-9a-f]{16}"))
    metadata: bytes = attrs.field(validator=[min_len(1), max_len(_MAX_METADATA)])
    fence: bytes = attrs.field(validator=[min_len(FENCE_BYTES), max_len(FENCE_BYTES)])
    fence_address: int = attrs.field(validator=_ADDRESS)
    fence_number: int = attrs.field(validator=ge(0))
    probe_digest: bytes
    probe_address: int = attrs.field(validator=_ADDRESS)
    probe_number: int = attrs.field(validator=ge(0))


def make_pipe(
    connection: Connection,
    settings: NixlPipeSettings,
    options: NixlPipeOptions,
    deadline: Deadline,
    *,
    only_loopback: bool,
    accepted: bool,
) -> NixlPipe:
    """Return the pipe over a connection, which is taken over. ``accepted``: this is the listening end.

    Raises:
        TimeoutError, PeerGoneError, WireError: there is no pipe, and the connection is closed.
        TransportError: NIXL fails at one end; the message has the reason.
        ResourceExhaustedError: one of the two processes has no free descriptor, thread or memory for it.
    """
    with OfferPipe.Join.over(connection, settings.heartbeat_timeout_s, deadline) as join:
        joining = _Joining(join, settings, options, only_loopback=only_loopback)
        try:
            return joining.pipe(accepted=accepted, pid=connection.peer.pid)
        except BaseException:
            joining.close()
            raise


class _Joining:
    """A pipe in the making."""

    def __init__(
        self,
        join: OfferPipe.Join,
        settings: NixlPipeSettings,
        options: NixlPipeOptions,
        *,
        only_loopback: bool,
    ) -> None:
        self._join = join
        self._settings = settings
        self._options = options
        self._only_loopback = only_loopback
        self._agent: Agent | None = None

    def close(self) -> None:
        if self._agent is not None:
            self._agent.close()

    def pipe(self, *, accepted: bool, pid: int) -> NixlPipe:
        theirs = self._join.exchange(Hello, self._hello, accepted=accepted)
        agent = self._agent
        assert agent is not None
        agent.connect(theirs.metadata, theirs.name)
        if accepted:
            self._serve(agent)
        lanes = self._probe(agent, theirs)
        logger.info("the pipe to %s reads through %s, %.2f GB/s", self._join.peer, lanes.text, lanes.gb_per_s)
        self._join.send(True)
        self._serve(agent)
        if not accepted:
            self._join.send(True)
        agent.release(self._probe_regions)
        seen = None if self._join.pidfd is None else pid
        peer_fence = PeerFence(agent, theirs.fence, (theirs.fence_address, theirs.fence_number), seen)
        return NixlPipe(self._join, agent, (self._fence, peer_fence), lanes, self._settings)

    def _hello(self) -> Hello:
        import torch

        mode = self._options.error_handling
        if mode == "auto":
            mode = "peer" if self._join.pidfd is None else "none"
        self._agent = agent = Agent(
            error_handling=mode, only_loopback=self._only_loopback, tls=self._options.tls
        )
        self._fence = OwnFence(agent)
        probe = torch.frombuffer(bytearray(os.urandom(4096) * (_PROBE_BYTES // 4096)), dtype=torch.uint8)
        ((address, _, number),), self._probe_regions = agent.register([probe])
        self._probed = probe
        return Hello(
            name=agent.name,
            metadata=agent.metadata(),
            fence=self._fence.number,
            fence_address=self._fence.place[0],
            fence_number=self._fence.place[1],
            probe_digest=digest(_HASH, memory_of(probe)),
            probe_address=address,
            probe_number=number,
        )

    def _probe(self, agent: Agent, theirs: Hello) -> Lanes:
        """Read the peer's memory, and measure the lanes."""
        import torch

        peer = self._join.peer
        memory = torch.empty(_PROBE_BYTES, dtype=torch.uint8)
        local, regions = agent.register([memory])
        remote = [(theirs.probe_address, _PROBE_BYTES, theirs.probe_number)]
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
                if self._join.deadline.expired:
                    raise TimeoutError(
                        f"the first read from {peer} did not end in time; UCX has the lanes"
                        f" {agent.lanes() or 'unknown'}"
                    )
                self._join.channel.check_not_declined()
                time.sleep(20e-6)
            best = min(best, time.perf_counter() - began)
        agent.release(regions)
        if digest(_HASH, memory_of(memory)) != theirs.probe_digest:
            raise TransportError(f"what NIXL read from {peer} is not what the peer has there")
        text = agent.lanes()
        if text and "rma_am(" not in text:
            need_help = False
        return Lanes(text=text or "unknown", gb_per_s=_PROBE_BYTES / best / 1e9, need_help=need_help)

    def _serve(self, agent: Agent) -> None:
        """Serve the peer's reads until it confirms that they are done."""
        while True:
            try:
                if self._join.receive(_SERVE_S) is not True:
                    raise WireError(f"{self._join.peer} does not join as this version does")
                return
            except TimeoutError:
                if self._join.deadline.expired:
                    raise
                agent.progress()
