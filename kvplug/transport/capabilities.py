"""What a transport can do and what it costs, as a frozen value.

A transport states its capabilities in its spec; an engine or connector states its requirements;
:meth:`Capabilities.missing` lists, in words, which requirements are not met. The conformance kit tests what
transports claim.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import attrs

from kvplug.errors import PluginError


def device_names(given: Any) -> frozenset[str]:
    names = None if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    if names is None or not all(isinstance(name, str) for name in names):
        raise PluginError(f"devices must be a set of names, such as {{'cpu'}}; got {given!r}")
    return frozenset(names)


@attrs.frozen(kw_only=True)
class Capabilities:
    """What a transport can do. Every field has the meaning its conformance test gives it.

    >>> Capabilities(devices={"cpu"}).missing(Requirements(device="cuda", cross_host=True))
    ('moves cpu tensors, but cuda tensors are needed', 'works on one host only, but the peer is on another')

    Raises:
        PluginError: ``devices`` is not a set of names; a single string is not accepted.
    """

    @attrs.frozen(kw_only=True)
    class Cost:
        """The cost of moving bytes, which the transport claims and ``transport = "auto"`` compares.

        Claims are for the transport's usual case on common hardware; only their order matters.

        >>> Capabilities.Cost(latency_us=100.0, gb_per_s=2.0).seconds(2_000_000_000)
        1.0001
        """

        latency_us: float
        """Microseconds until a small message has arrived."""
        gb_per_s: float
        """Throughput of large tensors, 10^9 bytes per second."""

        def __attrs_post_init__(self) -> None:
            if not (self.latency_us > 0 and self.gb_per_s > 0):
                raise ValueError(
                    f"both must be above 0: latency_us {self.latency_us}, gb_per_s {self.gb_per_s}"
                )

        def seconds(self, nbytes: int) -> float:
            """Return how many seconds a message of ``nbytes`` takes according to this claim."""
            return self.latency_us * 1e-6 + nbytes / (self.gb_per_s * 1e9)

    devices: frozenset[str] = attrs.field(default=frozenset({"cpu"}), converter=device_names)
    """Types of devices (``"cpu"``, ``"cuda"``) whose tensors the transport can send and receive into."""
    cross_host: bool = False
    """Whether the two ends may be on different hosts. If not, their probes must name the same domain."""
    authenticated: bool = True
    """Whether the data plane moves data only to and from peers that have proved themselves."""
    receive_into: bool = True
    """Whether ``recv_tensor(out=…)`` fills the caller's memory without an intermediate tensor."""
    full_duplex: bool = True
    """Whether both ends may send at once."""
    max_dims: int | None = None
    """The most dimensions a tensor may have; ``None`` if the transport sets no limit."""
    cost: Capabilities.Cost = Cost(latency_us=1000.0, gb_per_s=0.1)
    """The claimed cost of moving bytes. The default describes a slow transport."""

    def missing(self, required: Requirements) -> tuple[str, ...]:
        """Return why this transport does not meet ``required``, one reason each; empty if it does."""
        reasons = []
        if required.device not in self.devices:
            able = ", ".join(sorted(self.devices))
            reasons.append(f"moves {able} tensors, but {required.device} tensors are needed")
        if required.cross_host and not self.cross_host:
            reasons.append("works on one host only, but the peer is on another")
        if required.authenticated and not self.authenticated:
            reasons.append(
                "its data plane is not authenticated, and the address is reachable from other hosts"
                " (set allow_unauthenticated_data_plane to permit it)"
            )
        return tuple(reasons)


@attrs.frozen(kw_only=True)
class Requirements:
    """What one pair of ends needs from a transport.

    >>> Capabilities(devices={"cpu", "cuda"}).missing(Requirements(device="cuda"))
    ()
    """

    device: str = "cpu"
    """The type of the device that holds the tensors, without an index."""
    cross_host: bool = False
    """Whether the two ends are on different hosts."""
    authenticated: bool = False
    """Whether the data plane must authenticate peers, because other hosts can reach it."""


UNSTATED: Final = Capabilities().cost
"""The cost of a transport that does not state its cost; the conformance kit refuses such a transport."""
