"""Chooses the transport between two ends, with a reason for every candidate.

The choice is a pure and symmetric function: both ends compute the same result, although each passes its own
offers first. This module does not know any transport's name; capabilities, probes and costs decide.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvplug.errors import HandshakeError, Reason
from kvplug.transport.capabilities import Capabilities, Requirements
from kvplug.transport.spec import Probe

AUTO = "auto"
REFERENCE_NBYTES = 16 << 20
"""Message size for comparing costs: a few layers of a prompt's KV."""


@attrs.frozen(kw_only=True)
class Offer:
    """One transport, as available at one end."""

    name: str
    """Name of the transport."""
    protocol: int = 1
    """Must be equal at both ends."""
    capabilities: Capabilities = attrs.field(factory=Capabilities)
    """Its claims at this end."""
    probe: Probe = attrs.field(factory=Probe)
    """Its findings about this end's host."""
    auto: bool = True
    """Whether ``"auto"`` considers it."""


@attrs.frozen
class Candidate:
    """One transport, and the reason why it was chosen or not."""

    name: str
    """Name of the transport."""
    reason: str
    """The reason, in words for the operator."""

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


@attrs.frozen
class Selection:
    """The transport for one kind of device, with all candidates."""

    chosen: str
    """Name of the transport."""
    candidates: tuple[Candidate, ...]
    """The chosen one first, the others by name."""


def select(
    local: Sequence[Offer],
    remote: Sequence[Offer],
    required: Requirements,
    requested: tuple[str, str] = (AUTO, AUTO),
    *,
    nbytes: int = REFERENCE_NBYTES,
) -> Selection:
    """Return the transport that both ends will use for tensors on ``required.device``.

    Args:
        local, remote: each end's offers; names are unique in each.
        requested: the transport each config names, ours first, or ``"auto"``. A name binds both ends.
        nbytes: the message size for comparing costs.

    The cheapest transport that can work is chosen. Its cost is the higher of both ends' claims; names break
    ties.

    Raises:
        HandshakeError: two different names are requested, the requested transport cannot work, or none can.
            Its reasons are the fault, and one sentence for each candidate.
    """
    ours = {offer.name: offer for offer in local}
    theirs = {offer.name: offer for offer in remote}
    named = sorted({name for name in requested if name != AUTO})
    considered = {
        name: _obstacles(ours.get(name), theirs.get(name), required)
        for name in sorted({*named, *(offer.name for offer in (*local, *remote) if offer.auto)})
    }
    viable = [name for name, obstacles in considered.items() if not obstacles]
    by_whom = (
        "at both ends" if requested[0] == requested[1] else "here" if requested[1] == AUTO else "at the peer"
    )
    could_be = (
        f"these could be: {', '.join(viable)}, or {AUTO!r} at both ends"
        if viable
        else "install a transport that can, at both ends"
    )
    wrong = ""
    if len(named) > 1:
        wrong = f"ours {requested[0]!r}, theirs {requested[1]!r}"
        could_be = f"name the same one at both ends, or leave one of them at {AUTO!r}"
    elif named and named[0] not in viable:
        wrong = f"{named[0]!r} is named {by_whom} and cannot be used"
    elif not viable:
        wrong = f"none can move {required.device} tensors between the two ends"
    if wrong:
        others = (
            Reason(f"transport {name}", "; ".join(obstacles) or "could be used")
            for name, obstacles in considered.items()
        )
        raise HandshakeError(Reason("transport", wrong, could_be), *others)

    def seconds(name: str) -> float:
        return max(ends[name].capabilities.cost.seconds(nbytes) for ends in (ours, theirs))

    def takes(name: str) -> str:
        return f"{seconds(name) * 1e3:.3g} ms for {nbytes / (1 << 20):.3g} MiB"

    best = named[0] if named else min(viable, key=lambda name: (seconds(name), name))
    why = (
        f"named {by_whom}, and usable" if named else f"the cheapest that can: {takes(best)}, by its own claim"
    )
    candidates = [Candidate(best, why)]
    for name, obstacles in considered.items():
        if name != best:
            other = "" if obstacles else f"{best} is named" if named else f"claims {takes(name)}"
            candidates.append(Candidate(name, "; ".join(obstacles) or f"could be used, but {other}"))
    return Selection(best, tuple(candidates))


def _obstacles(ours: Offer | None, theirs: Offer | None, required: Requirements) -> list[str]:
    if ours is None or theirs is None:
        where = "at either end" if ours is theirs else "here" if ours is None else "at the peer"
        return [f"not installed {where}"]
    obstacles = []
    for offer, where in ((ours, "here"), (theirs, "at the peer"))[: 1 if ours is theirs else 2]:
        if not offer.probe.viable:
            obstacles.append(f"cannot work {where}: {offer.probe.reason or 'its probe gives no reason'}")
    if ours.protocol != theirs.protocol:
        obstacles.append(
            f"speaks protocol {ours.protocol} here and {theirs.protocol} at the peer;"
            " install the same version at both ends"
        )
    lacks_here = ours.capabilities.missing(required)
    lacks_there = theirs.capabilities.missing(required)
    obstacles += [lack if lack in lacks_there else f"{lack} (here)" for lack in lacks_here]
    obstacles += [f"{lack} (at the peer)" for lack in lacks_there if lack not in lacks_here]
    anywhere = ours.capabilities.cross_host and theirs.capabilities.cross_host
    if not required.cross_host and not anywhere and ours.probe.domain != theirs.probe.domain:
        obstacles.append("the two ends are on one host and still cannot reach each other (other namespaces?)")
    return obstacles
