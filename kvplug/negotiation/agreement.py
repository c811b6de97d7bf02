"""Turns two Hellos into one agreement, or into all the reasons against one.

:func:`agree` is pure and symmetric: ``agree(a, b)`` fails if and only if ``agree(b, a)`` does, because of
the same fields; both choose the same transport, checksum and wire version.

==============  =======================================================================================
sort            fields
==============  =======================================================================================
must match      wire major; engine (both or neither); role (complementary); the model's facts; dtype;
                layers, and how many are cached; tensor-parallel size and rank; whether the layout has
                keys and values or one latent
must differ     engine id, if KV crosses
negotiated      wire minor (the lower); checksum; transport; block size and layout (may differ, and are
                then converted; in a kernel's own order, they and the block format must be equal)
informative     model name, epoch, rank, identity, versions
==============  =======================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from kvplug.config.config import Role
from kvplug.errors import HandshakeError, Reason
from kvplug.negotiation.hello import EngineFacts, Hello
from kvplug.negotiation.model import ModelInfo
from kvplug.negotiation.select import AUTO, Selection, select
from kvplug.transport.capabilities import Requirements

OFF = "off"
SIGNALS_DEVICE = "cpu"
"""The kind of memory for signals and metadata at both ends, even if the KV is on a GPU."""


@attrs.frozen(kw_only=True)
class Agreement:
    """The agreement between two ends, as one of them sees it."""

    remote: Hello
    """The other end's Hello."""
    purpose: str
    """The purpose of the end that dialled."""
    wire_minor: int
    """Minor version of the wire format that both ends use: the lower of the two."""
    checksum: str | None
    """The hash that entries carry; ``None``: integrity is off."""
    cross_host: bool
    """Whether the ends are on different hosts, or may be."""
    transports: Mapping[str, Selection]
    """The transport for each type of device: ``"cpu"``, and the type that holds both ends' KV. Empty if no KV
    crosses."""
    converts: tuple[Reason, ...]
    """Differences that are converted, one sentence each."""


_SAME_MODEL = "start both ends with the same model (--model of the engine)"
_CHANGES = {
    "dtype": "set the KV cache's dtype (--kv-cache-dtype of the engine) to the same at both ends; no"
    " connector converts dtypes yet",
    "quantisation": "quantise the KV cache in the same way, with the same scales, at both ends",
    "rope": "give both ends the same model and the same rope settings",
    "window": "give both ends the same model and the same sliding window",
    "weights": "load the same weights at both ends, or set weights to the same text at both, such as 'NAME"
    " at REVISION', if they are the same and kvplug cannot read them",
}
"""The change to suggest if a field of the model differs; ``_SAME_MODEL`` for other fields."""
_BLOCK_CHANGES = {
    "block_format": "blocks are in an attention kernel's own order, which cannot be converted: use the same"
    " engine, attention backend and kind of processor at both ends; if that fails, also the same version",
    "block_size": "blocks in a kernel's own order are moved whole: set the same block size (--block-size)"
    " at both ends",
    "layout": "blocks in a kernel's own order are not rearranged: set the same layout at both ends",
}
"""The change to suggest if blocks are in a kernel's own order and one of these fields differs."""


def agree(local: Hello, remote: Hello) -> Agreement:
    """Return the agreement between ``local`` (ours) and ``remote`` (theirs).

    Raises:
        HandshakeError: its ``reasons`` name every field that prevents an agreement, as ``"field: ours X,
            theirs Y; what to change"``.
    """
    kv_crosses = local.moves_kv and remote.moves_kv
    cross_host = not local.identity.boot_id or local.identity.boot_id != remote.identity.boot_id
    reasons = list(_differences(local, remote, kv_crosses))
    transports: dict[str, Selection] = {}
    checksum: str | None = None
    try:
        checksum = _checksum(local, remote)
    except HandshakeError as e:
        reasons += e.reasons
    if kv_crosses:
        try:
            transports = _transports(local, remote, cross_host)
        except HandshakeError as e:
            reasons += e.reasons
    if reasons:
        raise HandshakeError(*reasons, peer=str(remote.identity))
    return Agreement(
        remote=remote,
        purpose=local.purpose or remote.purpose,
        wire_minor=min(local.wire[1], remote.wire[1]),
        checksum=checksum,
        cross_host=cross_host,
        transports=transports,
        converts=tuple(_converted(local, remote)),
    )


def _differs(field: str, ours: object, theirs: object, change: str) -> Reason:
    return Reason(field, f"ours {_shown(ours)}, theirs {_shown(theirs)}", change)


def _shown(value: object) -> str:
    return repr(value)[:200] if value is not None and value != "" else "none"


def _differences(local: Hello, remote: Hello, kv_crosses: bool) -> Iterator[str]:
    """Yield a reason for each field that must match but differs, or must differ but matches."""
    if local.wire[0] != remote.wire[0]:
        ours, theirs = (f"{major}.{minor}" for major, minor in (local.wire, remote.wire))
        change = "upgrade kvplug at the older end (pip install --upgrade kvplug)"
        yield Reason("wire", f"ours {ours}, theirs {theirs}", change)
    if local.purpose and remote.purpose and local.purpose != remote.purpose:
        yield _differs("purpose", local.purpose, remote.purpose, "use the same connector at both ends")
    if local.engine is None or remote.engine is None:
        if local.engine is not remote.engine:
            mine, yours = ("an engine" if it.engine else "a plain pipe" for it in (local, remote))
            yield _differs("engine", mine, yours, "connect an engine to an engine, and a pipe to a pipe")
        return
    if kv_crosses and local.engine_id and local.engine_id == remote.engine_id:
        change = "give each engine an id of its own, or none, and do not list an engine among its own peers"
        yield _differs("engine_id", local.engine_id, remote.engine_id, change)
    role = local.engine.role
    if kv_crosses and role is remote.engine.role and role is not Role.BOTH:
        other = Role.CONSUMER if role is Role.PRODUCER else Role.PRODUCER
        change = f"set the role of one to '{other}', or to '{Role.BOTH}'"
        yield Reason("role", f"both sides are {role}s", change)
    for name in (field.name for field in attrs.fields(ModelInfo) if field.name != "name"):
        mine, yours = getattr(local.engine.model, name), getattr(remote.engine.model, name)
        if mine != yours or (name == "weights" and not mine):  # both unknown: the weights may differ
            field = name if name == "dtype" else f"model.{name}"
            yield _differs(field, mine, yours, _CHANGES.get(name, _SAME_MODEL))
    yield from _engine_differences(local.engine, remote.engine, kv_crosses)


def _engine_differences(local: EngineFacts, remote: EngineFacts, kv_crosses: bool) -> Iterator[str]:
    """Yield a reason for each field of the cache's split and layout that prevents an agreement. A side that
    moves no KV may not know the kernel."""

    def both(field: str) -> tuple[object, object] | None:
        """Return both ends' values of the field if both state one and they differ."""
        pair = getattr(local, field), getattr(remote, field)
        return pair if pair[0] != pair[1] and None not in pair else None

    own_order = bool(local.block_format or remote.block_format)
    if pair := both("layers"):
        change = "split the layers into the same pipeline stages (--pipeline-parallel-size) at both ends"
        yield _differs("layers", *pair, change)
    elif pair := both("cache_layers"):
        change = "use the same draft model (--speculative-config) at both ends, or none"
        yield _differs("cache_layers", *pair, change)
    sizes = local.tensor_parallel_size, remote.tensor_parallel_size
    # Every worker has all of a latent cache (a layout without K), so its blocks are never divided.
    needs_division = own_order and "K" in local.layout + remote.layout
    if local.splits_heads and remote.splits_heads and not needs_division:
        if max(sizes) % min(sizes):
            yield _differs("tensor_parallel_size", *sizes, "make one a multiple of the other")
    else:
        if sizes[0] != sizes[1]:
            change = "split the heads over the same number of workers (--tensor-parallel-size)" + (
                ": blocks in a kernel's own order cannot be divided"
                if needs_division
                else ", or use a connector that converts the split, such as 'p2p'"
            )
            yield _differs("tensor_parallel_size", *sizes, change)
        if pair := both("tensor_parallel_rank"):
            change = "connect each worker to the one that holds the same heads: worker r to worker r"
            yield _differs("tensor_parallel_rank", *pair, change)
    if ("K" in local.layout) != ("K" in remote.layout):
        change = (
            "one end has keys and values, the other one latent per token, and no connector converts these"
        )
        yield _differs("layout", local.layout, remote.layout, change)
    if own_order:
        for field, change in _BLOCK_CHANGES.items():
            if (pair := both(field)) and (kv_crosses or field != "block_format"):
                yield _differs(field, *pair, change)


def _converted(local: Hello, remote: Hello) -> Iterator[Reason]:
    if local.engine is not None and remote.engine is not None:
        for field in ("block_size", "layout"):
            ours, theirs = getattr(local.engine, field), getattr(remote.engine, field)
            if ours != theirs:
                yield Reason(field, f"ours {ours}, theirs {theirs}")
    if _device(local) != _device(remote):
        yield Reason("device", f"ours {_device(local)}, theirs {_device(remote)}")


def _checksum(local: Hello, remote: Hello) -> str | None:
    """Return the hash that suits both ends' preferences best.

    Returns ``None`` if they have no hash in common and neither requires one.

    Raises:
        HandshakeError: one end requires a hash that the other does not have.
    """
    common = [name for name in local.checksums if name in remote.checksums]
    if common:
        return min(common, key=lambda n: (local.checksums.index(n) + remote.checksums.index(n), n))
    if {local.integrity, remote.integrity} <= {AUTO, OFF}:
        return None
    ours, theirs = (
        f"{it.integrity[:200]!r} (can use {', '.join(it.checksums) or 'none'})" for it in (local, remote)
    )
    change = f"set integrity to {AUTO!r} at both ends, or to the same hash, or to {OFF!r} at both"
    raise HandshakeError(Reason("integrity", f"ours {ours}, theirs {theirs}", change))


def _device(side: Hello) -> str:
    return side.device.partition(":")[0]


def _transports(local: Hello, remote: Hello, cross_host: bool) -> dict[str, Selection]:
    """Select a transport for signals and one for the KV; they are the same if the KV is in CPU memory.

    If the ends' KV is on different kinds of device, only a pipe for CPU tensors is selected, and kvplug does
    not stage the KV for it: an engine that stages its pages states that its KV is on the CPU. Transports
    named in the configs apply to the KV.
    """
    kv_device = _device(local) if _device(local) == _device(remote) else SIGNALS_DEVICE
    selections: dict[str, Selection] = {}
    reasons: list[str] = []
    for device in dict.fromkeys((kv_device, SIGNALS_DEVICE)):
        required = Requirements(
            device=device,
            cross_host=cross_host,
            authenticated=local.require_authenticated or remote.require_authenticated,
        )
        is_kv = device == kv_device
        names = (local.requested_transport, remote.requested_transport) if is_kv else (AUTO, AUTO)
        try:
            selections[device] = select(local.transports, remote.transports, required, names)
        except HandshakeError as e:
            reasons += e.reasons
    if reasons:
        raise HandshakeError(*dict.fromkeys(reasons))
    return selections
