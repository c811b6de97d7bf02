"""Finds the transports that a command line names, and the reasons if they cannot be measured here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvplug.assembly.registry import Registry
from kvplug.assembly.resolve import ResolvedConfig
from kvplug.config.config import Config
from kvplug.config.messages import listed
from kvplug.errors import PluginLoadError, UnknownTransportError
from kvplug.transport.capabilities import Requirements
from kvplug.transport.spec import TRANSPORTS, Kind, TransportSpec
from kvplug_bench.candidate import Candidate
from kvplug_bench.device import CPU, kind_of

_KEYS: Final = {Kind.PIPE: "transport", Kind.QUEUE: "queue"}
"""The config key that names the transport, by kind."""
_LINKS: Final = {
    Kind.PIPE: "kvplug_bench.transports:PipeLink",
    Kind.QUEUE: "kvplug_bench.transports:QueueLink",
}


def transports(
    registry: Registry,
    names: Sequence[str],
    *,
    path: str | None,
    overrides: Sequence[str],
    max_chunk_bytes: int,
    max_chunks: int,
    devices: tuple[str, ...] = (CPU,),
) -> list[Candidate]:
    """Pipes and message queues with these names (``NAME`` or ``KIND:NAME``), or all that "auto" considers.

    Args:
        path: the configuration file with their options.
        overrides: ``key=value`` of the configuration.
        devices: the device of each end's tensors.

    Raises:
        UnknownTransportError: no pipe and no queue has this name; lists the known names and a similar one.
        AmbiguousNameError: two plugins offer the name.
        ConfigError: the configuration or the options of a transport are wrong; lists every fault of the
            first wrong one.
    """
    resolved = ResolvedConfig(Config.load(path, overrides=overrides), registry)
    chosen = []
    for kind, name in _named(registry, names):
        arguments: dict[str, object] = {
            "path": path,
            "overrides": [*overrides, f"{_KEYS[kind]}={name}"],
        }
        if kind is Kind.QUEUE:
            arguments |= {"max_chunk_bytes": max_chunk_bytes, "max_chunks": max_chunks}
        spec = registry.get(kind, name)
        assert isinstance(spec, TransportSpec)
        chosen.append(
            Candidate(
                name=spec.name,
                kind=str(kind),
                link=_LINKS[kind],
                arguments=arguments,
                largest_looked=max_chunk_bytes,
                devices=devices,
                skipped_because=_against(spec, resolved, kind_of(devices[0])),
            )
        )
    return chosen


def _named(registry: Registry, names: Sequence[str]) -> list[tuple[Kind, str]]:
    if not names:
        every = [spec for kind in _KEYS for spec in registry.specs(kind)]
        return [(spec.kind, spec.name) for spec in every if spec.auto]
    found: list[tuple[Kind, str]] = []
    for name in names:
        word, _, rest = name.partition(":")
        kinds = [kind for kind in _KEYS if word == kind and rest] or list(_KEYS)
        bare = rest if len(kinds) == 1 else name
        offering = [(kind, bare) for kind in kinds if registry.owners(kind, bare)]
        if not offering:
            raise _unknown(registry, bare, kinds)
        found += [each for each in offering if each not in found]
    return found


def _unknown(registry: Registry, name: str, kinds: Sequence[Kind]) -> UnknownTransportError:
    what = listed(f"no {kind}" if kind is kinds[0] else kind for kind in kinds)
    other = [kind for kind in TRANSPORTS if kind not in kinds and registry.owners(kind, name)]
    if other:
        end = "" if other[0] in _KEYS else "; kvplug bench measures pipes and queues"
        return UnknownTransportError(
            f"{what} is named {name!r}, which is a {other[0].replace('_', ' ')}{end}"
        )
    known = (spec.name for kind in kinds for spec in registry.specs(kind))
    return UnknownTransportError(registry.about_unknown(f"{what} is named", name, known))


def _against(spec: TransportSpec, resolved: ResolvedConfig, device: str) -> str:
    """The reason if the transport cannot be measured; empty if it can."""
    try:
        resolved.options_of(spec)
    except PluginLoadError as e:
        return str(e)
    if spec.kind is Kind.QUEUE and device != CPU:
        return "queues are measured with CPU tensors"
    probe = spec.run_probe()
    lacks = spec.capabilities.missing(Requirements(device=device))
    return "; ".join([*(() if probe.viable else (probe.reason or "its probe gives no reason",)), *lacks])
