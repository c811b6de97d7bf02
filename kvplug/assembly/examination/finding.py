"""A finding of ``kvplug doctor``: what was found, why it matters, and the line to change."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

import attrs

from kvplug.net.peer_text import peer_text

Verdict = Literal["ok", "note", "problem"]

_MAX_FROM_PEER: Final = 64
_MAX_REASONS: Final = 16
_MAX_SAID: Final = 400
"""Findings, reasons of one, and characters of a text, that are taken from a peer."""
_REFUSED: Final = re.compile(r"(?P<field>[\w. ]+): (?P<what>ours .+?, theirs .+?); (?P<change>.+)", re.S)


@attrs.frozen(kw_only=True)
class Finding:
    """One thing that was looked at."""

    topic: str
    """The key of the config, or the part of kvplug or of the host, that it is about."""
    verdict: Verdict
    """``"problem"``: nothing is built or moves, or far too slowly, until it is changed."""
    what: str
    why: tuple[str, ...] = ()
    change: str = ""
    """A line of the config, an option of an engine, or a command; empty where nothing must be changed."""
    at: Literal["here", "peer"] = "here"

    def to_plain(self) -> dict[str, Any]:
        """Plain values, for the wire and for JSON."""
        return {**attrs.asdict(self), "why": list(self.why)}


def findings_of_peer(plain: object) -> tuple[Finding, ...]:
    """The findings that a peer has sent, made fit for a terminal; what is none is left out."""
    found = []
    for each in plain[:_MAX_FROM_PEER] if isinstance(plain, list) else ():
        if isinstance(each, Mapping) and peer_text(each.get("verdict")) in get_args(Verdict):
            why = each.get("why")
            found.append(
                Finding(
                    topic=peer_text(each.get("topic"), 40),
                    verdict=each["verdict"],
                    what=peer_text(each.get("what"), _MAX_SAID),
                    why=tuple(peer_text(reason, _MAX_SAID) for reason in why[:_MAX_REASONS])
                    if isinstance(why, list)
                    else (),
                    change=peer_text(each.get("change"), _MAX_SAID),
                    at="peer",
                )
            )
    return tuple(found)


_LINES: Final[Mapping[str, str]] = {
    "wire": "pip install --upgrade kvplug    (at the end with the lower number)",
    "hello": "pip install --upgrade kvplug    (the same version at both ends)",
    "agreement": "pip install --upgrade kvplug    (the same version at both ends)",
    "role": 'role = "both"    (or "producer" at one end and "consumer" at the other)',
    "engine_id": "engine_id: leave it out, or give each engine one of its own",
    "integrity": 'integrity = "auto"    (at both ends)',
    "transport": 'transport = "auto"    (at both ends)',
    "dtype": "--kv-cache-dtype of the engine: the same at both ends",
    "block_size": "--block-size of the engine: the same at both ends",
    "block_format": "the engine's attention backend: the same at both ends",
    "layers": "--pipeline-parallel-size of the engine: the same at both ends",
    "cache_layers": "--speculative-config of the engine: the same at both ends",
    "tensor_parallel_size": "--tensor-parallel-size of the engine: the same at both ends",
    "tensor_parallel_rank": "peers: the address of worker 0; worker r dials worker r",
    "model.weights": 'weights = "NAME at REVISION"    (at both ends, if their weights are the same)',
    "engine": "--peer: the address of an engine, not of a plain pipe or store",
}
"""The line to change for a field of the handshake."""
_MODEL_LINE: Final = "--model of the engine: the same at both ends"


def field_of(reason: str) -> str:
    """The field of the handshake that a reason of a refusal is about."""
    return reason.partition(":")[0].partition(" ")[0]


def line_for(field: str) -> str:
    """The line to change for a field of the handshake; empty where no single line is known."""
    return _LINES.get(field, _MODEL_LINE if field.startswith("model.") else "")


def line_for_transport(text: str, otherwise: str = _LINES["transport"]) -> str:
    """The line to change for what is wrong with the transports of two ends."""
    if "speaks protocol" in text:
        return "pip install --upgrade NAME    (the transport's package, the same version at both ends)"
    if "none can move" in text or "blocked:" in text:
        return "pip install NAME    (of a package with a pipe; or take it out of KVPLUG_DISABLE_PLUGINS)"
    return otherwise


def refusals(reasons: tuple[str, ...], peer: str) -> tuple[Finding, ...]:
    """Findings from the reasons of a refused handshake; reasons of candidates belong to the one before."""
    found: list[Finding] = []
    for reason in reasons:
        field = field_of(reason)
        if found and reason.startswith("transport ") and found[-1].topic == "transport":
            why = (*found[-1].why, reason.removeprefix("transport "))
            line = line_for_transport("; ".join((found[-1].what, *why)))
            found[-1] = attrs.evolve(found[-1], why=why, change=line)
            continue
        parts = _REFUSED.fullmatch(reason)
        what = parts["what"] if parts else reason.partition(": ")[2] or reason
        advice = (parts["change"],) if parts else ()
        found.append(
            Finding(
                topic=field if parts or ": " in reason else "handshake",
                verdict="problem",
                what=f"refused with {peer}: {what}",
                why=advice,
                change=line_for(field) or "".join(advice),
            )
        )
    return tuple(found)
