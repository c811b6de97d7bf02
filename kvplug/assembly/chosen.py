"""The one transport of a kind that a config names; where it says "auto", the one with the least latency."""

from __future__ import annotations

from typing import Literal

from kvplug.assembly.connector import Parts
from kvplug.errors import PluginError
from kvplug.negotiation.select import AUTO
from kvplug.transport.capabilities import Requirements
from kvplug.transport.spec import Kind, TransportSpec


def chosen(
    parts: Parts,
    kind: Literal[Kind.PIPE, Kind.QUEUE, Kind.COMMUNICATOR],
    name: str,
    required: Requirements,
) -> TransportSpec:
    """Which transport is meant.

    Raises:
        UnknownTransportError, AmbiguousNameError: the name is not there, or there twice.
        PluginError: the named one does not serve, or none does; with every reason.
    """
    registry = parts.registry
    every = [spec for spec in registry.transports(kind) if spec.auto and not spec.wraps]
    specs = every if name == AUTO else [registry.get(kind, name)]
    reasons = {spec.name: _against(spec, required) for spec in specs}
    able = [spec for spec in specs if not reasons[spec.name]]
    if able:
        return min(able, key=lambda spec: (spec.capabilities.cost.latency_us, spec.name))
    what = {Kind.PIPE: "pipe", Kind.QUEUE: "message queue", Kind.COMMUNICATOR: "device communicator"}[kind]
    lines = [f"{spec}: {'; '.join(why)}" for spec, why in reasons.items()] or ["none is installed"]
    raise PluginError("\n  - ".join([f"no {what} can be had:", *lines, *registry.failures()]))


def _against(spec: TransportSpec, required: Requirements) -> tuple[str, ...]:
    probe = spec.run_probe()
    return (*(() if probe.viable else (probe.reason,)), *spec.capabilities.missing(required))
