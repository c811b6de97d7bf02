"""From two Hellos to one agreement, or to every reason why there is none.

:func:`agree` is pure and symmetric: ``agree(a, b)`` fails if and only if ``agree(b, a)`` does, over the
same fields, and both choose the same transport, checksum and wire version.

==============  =======================================================================================
sort            fields
==============  =======================================================================================
must match      wire major; engine (both or neither); role (complementary); the model's facts; dtype;
                layers, and how many are cached; tensor-parallel size and rank; whether the layout has
                keys and values or one latent
must differ     engine id, where KV crosses
negotiated      wire minor (the lower); checksum; transport; block size and layout (may differ, and are
                then converted; where a kernel orders blocks in its own way, all three must be equal)
informative     model name, epoch, rank, identity, versions
==============  =======================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from kvplug.errors import HandshakeError
from kvplug.negotiation.handshake.hello import BOTH, PRODUCER, EngineFacts, Hello
from kvplug.negotiation.model import ModelInfo
from kvplug.negotiation.select import AUTO, Selection, select
from kvplug.transport.capabilities import Requirements

OFF = "off"
SIGNALS_DEVICE = "cpu"
"""Signals and metadata cross from and to this kind of memory, wherever the KV is."""


@attrs.frozen(kw_only=True)
class Agreement:
    """The agreement of two ends, as one of them sees it."""

    remote: Hello
    """The other end's statement."""
    purpose: str
    """The purpose of the end that dialled."""
    wire_minor: int
    """Minor version of the wire format that both ends speak: the lower of the two."""
    checksum: str | None
    """The hash that entries carry; ``None``: integrity is off."""
    cross_host: bool
    """Whether the ends are on different hosts, or may be."""
    transports: Mapping[str, Selection]
    """By type of device: ``"cpu"``, and the type both ends' KV is on. Empty where no KV crosses."""
    converts: tuple[str, ...]
    """What differs and is converted, one sentence each."""


_SAME_MODEL = "start both ends with the same model"
_CHANGES = {
    "dtype": "set the KV cache's dtype to the same at both ends; no connector converts dtypes yet",
    "quantisation": "quantise the KV cache in the same way, with the same scales, at both ends",
    "rope": "give both ends the same model and the same rope settings",
    "window": "give both ends the same model and the same sliding window",
    "weights": "load the same weights at both ends, or set weights to the same text at both where they are"
    " the same and kvplug cannot read them",
}
"""What to change when a field of the model differs; otherwise ``_SAME_MODEL``."""
_INFORMATIVE = frozenset({"name"})


def agree(local: Hello, remote: Hello) -> Agreement:
    """The agreement of ``local`` (ours) and ``remote`` (theirs).

    Raises:
        HandshakeError: its ``reasons`` name every field that stands in the way, as
            ``"field: ours X, theirs Y; what to change"``.
    """
    reasons = [
        *_wire(local, remote),
        *_purpose(local, remote),
        *_engines(local, remote),
    ]
    checksum, refused = _checksum(local, remote)
    reasons += refused
    cross_host = not local.identity.boot_id or local.identity.boot_id != remote.identity.boot_id
    transports, refused = _transports(local, remote, cross_host)
    reasons += refused
    if reasons:
        raise HandshakeError(*reasons, peer=str(remote.identity))
    return Agreement(
        remote=remote,
        purpose=local.purpose or remote.purpose,
        wire_minor=min(local.wire[1], remote.wire[1]),
        checksum=checksum,
        cross_host=cross_host,
        transports=transports,
        converts=_converts(local, remote),
    )


def _differs(field: str, ours: object, theirs: object, change: str) -> str:
    return f"{field}: ours {_shown(ours)}, theirs {_shown(theirs)}; {change}"


def _shown(value: object) -> str:
    return repr(value)[:200] if value is not None and value != "" else "none"


def _wire(local: Hello, remote: Hello) -> list[str]:
    if local.wire[0] == remote.wire[0]:
        return []
    ours, theirs = (f"{major}.{minor}" for major, minor in (local.wire, remote.wire))
    return [f"wire: ours {ours}, theirs {theirs}; upgrade kvplug where it is older"]


def _purpose(local: Hello, remote: Hello) -> list[str]:
    if not local.purpose or not remote.purpose or local.purpose == remote.purpose:
        return []
    return [_differs("purpose", local.purpose, remote.purpose, "use the same connector at both ends")]


def _engines(local: Hello, remote: Hello) -> list[str]:
    """The facts that must match between two engines; plain pipes have none."""
    ours, theirs = local.engine, remote.engine
    if ours is None and theirs is None:
        return []
    if ours is None or theirs is None:
        mine, yours = ("a plain pipe" if facts is None else "an engine" for facts in (ours, theirs))
        return [_differs("engine", mine, yours, "connect an engine to an engine, and a pipe to a pipe")]
    kv_crosses = local.moves_kv and remote.moves_kv
    return [
        *(_engine_id(local, remote) if kv_crosses else []),
        *(_role(ours, theirs) if kv_crosses else []),
        *_model(ours.model, theirs.model),
        *_shards(ours, theirs),
        *_layout_kind(ours, theirs),
        *_block_format(ours, theirs, kv_crosses),
    ]


def _engine_id(local: Hello, remote: Hello) -> list[str]:
    if local.engine_id != remote.engine_id or not local.engine_id:
        return []
    change = "give each engine an id of its own, or none; and do not name an engine among its own peers"
    return [_differs("engine_id", local.engine_id, remote.engine_id, change)]


def _role(local: EngineFacts, remote: EngineFacts) -> list[str]:
    if local.role != remote.role or local.role == BOTH:
        return []
    other = "consumer" if local.role == PRODUCER else "producer"
    return [f"role: both sides are {local.role}s; set the role of one to {other!r}, or to {BOTH!r}"]


def _model(ours: ModelInfo, theirs: ModelInfo) -> list[str]:
    reasons = []
    for name in (field.name for field in attrs.fields(ModelInfo)):
        if name in _INFORMATIVE:
            continue
        mine, yours = getattr(ours, name), getattr(theirs, name)
        if mine == yours and (mine or name != "weights"):  # two unknown ones may differ
            continue
        field = name if name == "dtype" else f"model.{name}"
        reasons.append(_differs(field, mine, yours, _CHANGES.get(name, _SAME_MODEL)))
    return reasons


def _shards(local: EngineFacts, remote: EngineFacts) -> list[str]:
    reasons = []
    if None not in (local.layers, remote.layers) and local.layers != remote.layers:
        change = "split the layers into the same pipeline stages at both ends"
        reasons.append(_differs("layers", local.layers, remote.layers, change))
    cached = local.cache_layers, remote.cache_layers
    if not reasons and None not in cached and cached[0] != cached[1]:
        change = "use the same draft model at both ends, or none: its layers are in the cache as well"
        reasons.append(_differs("cache_layers", *cached, change))
    sizes = local.tensor_parallel_size, remote.tensor_parallel_size
    if local.splits_heads and remote.splits_heads and not (local.block_format or remote.block_format):
        if max(sizes) % min(sizes):
            change = "make one a multiple of the other"
            reasons.append(_differs("tensor_parallel_size", *sizes, change))
        return reasons
    if local.tensor_parallel_size != remote.tensor_parallel_size:
        change = "split the heads over the same number of workers"
        if local.block_format or remote.block_format:
            change += ": blocks in a kernel's own order cannot be divided"
        else:
            change += ", or use a connector that converts the split, such as 'p2p'"
        reasons.append(_differs("tensor_parallel_size", *sizes, change))
    ranks = local.tensor_parallel_rank, remote.tensor_parallel_rank
    if None not in ranks and ranks[0] != ranks[1]:
        change = "connect each worker to the one that holds the same heads"
        reasons.append(_differs("tensor_parallel_rank", *ranks, change))
    return reasons


def _layout_kind(local: EngineFacts, remote: EngineFacts) -> list[str]:
    if ("K" in local.layout) == ("K" in remote.layout):
        return []
    change = "one has keys and values and the other one latent per token, which nothing converts"
    return [_differs("layout", local.layout, remote.layout, change)]


def _block_format(local: EngineFacts, remote: EngineFacts, kv_crosses: bool) -> list[str]:
    """Check blocks in a kernel's own order: they move only between caches of the same layout and format.

    A side that moves no KV may not know the kernel, but knows the block size and layout.
    """
    if not (local.block_format or remote.block_format):
        return []
    changes = {
        "block_format": "blocks are in an attention kernel's own order, which nothing converts: use the same"
        " engine, attention backend and kind of processor at both ends, else also the same version",
        "block_size": "blocks in a kernel's own order are moved whole: set the same block size at both ends",
        "layout": "blocks in a kernel's own order are not rearranged: set the same layout at both ends",
    }
    if not kv_crosses:
        del changes["block_format"]
    pairs = ((field, getattr(local, field), getattr(remote, field)) for field in changes)
    return [_differs(field, ours, theirs, changes[field]) for field, ours, theirs in pairs if ours != theirs]


def _converts(local: Hello, remote: Hello) -> tuple[str, ...]:
    found = []
    if local.engine is not None and remote.engine is not None:
        for field in ("block_size", "layout"):
            ours, theirs = getattr(local.engine, field), getattr(remote.engine, field)
            if ours != theirs:
                found.append(f"{field}: ours {ours}, theirs {theirs}")
    if _device(local) != _device(remote):
        found.append(f"device: ours {_device(local)}, theirs {_device(remote)}")
    return tuple(found)


def _checksum(local: Hello, remote: Hello) -> tuple[str | None, list[str]]:
    """The hash that both have (by both preferences); none if either is off, unless the other requires one."""
    common = [name for name in local.checksums if name in remote.checksums]
    if common:

        def preference(name: str) -> tuple[int, str]:
            return local.checksums.index(name) + remote.checksums.index(name), name

        return min(common, key=preference), []
    insisting = [it.integrity for it in (local, remote) if it.integrity not in (AUTO, OFF)]
    if not insisting:
        return None, []
    change = f"set integrity to {AUTO!r} at both ends, or to the same hash, or to {OFF!r} at both"
    ours, theirs = (_integrity(it) for it in (local, remote))
    return None, [f"integrity: ours {ours}, theirs {theirs}; {change}"]


def _integrity(side: Hello) -> str:
    can = f" (can use {', '.join(side.checksums)})" if side.checksums else " (can use none)"
    return f"{side.integrity[:200]!r}{can}"


def _device(side: Hello) -> str:
    return side.device.partition(":")[0]


def _transports(local: Hello, remote: Hello, cross_host: bool) -> tuple[dict[str, Selection], list[str]]:
    """One selection for signals and one for the KV, which is the same where the KV is in CPU memory.

    Ends whose KV is on different kinds of device get the pipe for CPU tensors only, and nothing stages the KV
    for it: engines whose pages are staged state that their KV is on the CPU. The names in the configs are for
    the KV.
    """
    if not (local.moves_kv and remote.moves_kv):
        return {}, []
    kv_device = _device(local) if _device(local) == _device(remote) else SIGNALS_DEVICE
    requested = (local.requested_transport, remote.requested_transport)
    selections: dict[str, Selection] = {}
    reasons: list[str] = []
    for device in dict.fromkeys((kv_device, SIGNALS_DEVICE)):
        required = Requirements(
            device=device,
            cross_host=cross_host,
            authenticated=local.require_authenticated or remote.require_authenticated,
        )
        names = requested if device == kv_device else (AUTO, AUTO)
        try:
            selections[device] = select(local.transports, remote.transports, required, names)
        except HandshakeError as e:
            reasons += e.reasons
    return selections, list(dict.fromkeys(reasons))
