"""The Hello: one side's statement about itself, sent before anything else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvplug.negotiation.handshake.plain import MAX_TEXT, FieldReader
from kvplug.negotiation.model import ModelInfo
from kvplug.negotiation.select import AUTO, Offer
from kvplug.net.peer_text import peer_text
from kvplug.net.trust.identity import PeerIdentity
from kvplug.net.wire import frames
from kvplug.transport.capabilities import Capabilities, Cost
from kvplug.transport.spec import Probe

PRODUCER, CONSUMER, BOTH = "producer", "consumer", "both"
ROLES = (PRODUCER, CONSUMER, BOTH)
DOCTOR = "doctor"
"""The purpose of a side that only finds out what would be agreed on."""


@attrs.frozen(kw_only=True)
class EngineFacts:
    """An engine's statement about its model, its KV cache and its place among the workers."""

    role: str = attrs.field(converter=str, validator=attrs.validators.in_(ROLES))
    """``producer``, ``consumer`` or ``both``."""
    model: ModelInfo
    """The model, as far as its KV is concerned."""
    layers: tuple[int, int] | None = None
    """First layer and one past the last of its pipeline stage; ``None`` if it belongs to no single stage."""
    cache_layers: int | None = None
    """Layers in this side's cache, a draft model's included; ``None`` where it holds none."""
    tensor_parallel_size: int = 1
    """Workers among which the heads are split."""
    tensor_parallel_rank: int | None = None
    """The shard of the heads that this side holds; ``None`` for a scheduler side."""
    layout: str
    """Axis string of one layer's cache."""
    block_size: int
    """Tokens in a block."""
    block_format: str = ""
    """Name of the kernel's own order inside a block; empty where the layout says all."""
    rank: int = 0
    """Of this worker in its engine."""
    world_size: int = 1
    """Workers of its engine."""
    splits_heads: bool = False
    """Its connector moves KV between engines that split the heads differently."""

    def to_plain(self) -> dict[str, Any]:
        """Plain values, for the wire."""
        plain = attrs.asdict(self)
        return plain if self.layers is None else {**plain, "layers": list(self.layers)}

    @classmethod
    def read(cls, read: FieldReader) -> EngineFacts:
        """The facts that :meth:`to_plain` gave; what is wrong is noted in the reader's ``faults``."""
        layers: tuple[int, int] | None = None
        if read.is_set("layers"):
            first, end = read.integers("layers", 2)
            layers = (first, end)
        return cls(
            role=read.choice("role", ROLES, BOTH),
            model=_read_model(read.part("model")),
            layers=layers,
            cache_layers=read.optional_integer("cache_layers", 1),
            tensor_parallel_size=read.integer("tensor_parallel_size", 1),
            tensor_parallel_rank=read.optional_integer("tensor_parallel_rank"),
            layout=_read_layout(read),
            block_size=read.integer("block_size", 1),
            block_format=read.text("block_format"),
            rank=read.integer("rank"),
            world_size=read.integer("world_size", 1),
            splits_heads=read.boolean("splits_heads"),
        )


@attrs.frozen(kw_only=True)
class Hello:
    """A side's statement about itself. ``agree`` decides what follows from two of them."""

    wire: tuple[int, int] = (frames.MAJOR, frames.MINOR)
    """Version of the wire format: major, minor."""
    purpose: str = ""
    """Why the side that dialled connects, a word of the connector's; empty at the side that accepted."""
    moves_kv: bool = True
    """Whether tensors will cross. Where either side says no, roles are not compared and no transport is
    selected."""
    engine: EngineFacts | None = None
    """``None``: a plain pipe, with no engine behind it."""

    # negotiated
    integrity: str = AUTO
    """``"auto"``, ``"off"``, or the name of the one hash that this side requires."""
    checksums: tuple[str, ...] = ()
    """Hashes this side can use, the preferred one first; none when integrity is off."""
    requested_transport: str = AUTO
    """``"auto"``, or the name of the one pipe that this side uses."""
    transports: tuple[Offer, ...] = ()
    """The pipes that this side has and its config allows."""
    device: str = "cpu"
    """Type of the device whose memory the tensors cross from or to."""
    require_authenticated: bool = False
    """The data plane must authenticate: other hosts can reach this side, and its config permits no less."""

    # informative
    engine_id: str = ""
    """The config's ``engine_id``, for messages."""
    epoch: str = ""
    """Changes when the process restarts."""
    identity: PeerIdentity
    """The process, and its host: for liveness, and to tell whether both ends are on one host."""
    versions: Mapping[str, str] = attrs.field(factory=dict)
    """Of kvplug, Python and torch, by name; for messages."""

    def to_plain(self) -> dict[str, Any]:
        """Plain values, for the wire. A probe's reason, which may be any text, is made to fit."""
        return {
            "wire": list(self.wire),
            "purpose": self.purpose,
            "moves_kv": self.moves_kv,
            "engine": None if self.engine is None else self.engine.to_plain(),
            "integrity": self.integrity,
            "checksums": list(self.checksums),
            "requested_transport": self.requested_transport,
            "transports": [_offer_to_plain(offer) for offer in self.transports],
            "device": self.device,
            "require_authenticated": self.require_authenticated,
            "engine_id": self.engine_id,
            "epoch": self.epoch,
            "identity": attrs.asdict(self.identity),
            "versions": dict(self.versions),
        }

    @classmethod
    def from_plain(cls, plain: object) -> Hello:
        """The Hello that :meth:`to_plain` gave, here or in another version.

        Raises:
            HandshakeError: every field that is missing, malformed or out of bounds, with what it must be.
        """
        read = FieldReader(plain)
        major, minor = read.integers("wire", 2)
        hello = cls(
            wire=(major, minor),
            purpose=read.text("purpose"),
            moves_kv=read.boolean("moves_kv"),
            engine=EngineFacts.read(read.part("engine")) if read.is_set("engine") else None,
            integrity=read.text("integrity"),
            checksums=read.texts("checksums"),
            requested_transport=read.text("requested_transport"),
            transports=read.each("transports", _read_offer),
            device=read.text("device"),
            require_authenticated=read.boolean("require_authenticated"),
            engine_id=read.text("engine_id"),
            epoch=read.text("epoch"),
            identity=_read_identity(read.part("identity")),
            versions=read.mapping_of_texts("versions"),
        )
        names = [offer.name for offer in hello.transports]
        if len(set(names)) != len(names):
            read.faults.append("transports: the peer offers one name twice")
        read.check()
        return hello


def _read_layout(read: FieldReader) -> str:
    layout = read.text("layout")
    if not set(layout) <= set("LKBTHD") or len(set(layout)) != len(layout):
        read.fault("layout", layout, "some of LKBTHD, once each")
    return layout


def _read_model(read: FieldReader) -> ModelInfo:
    return ModelInfo(
        name=read.text("name"),
        attention=read.text("attention"),
        num_layers=read.integer("num_layers"),
        num_kv_heads=read.integer("num_kv_heads"),
        head_size=read.integer("head_size"),
        dtype=read.text("dtype"),
        rope=read.text("rope"),
        window=read.optional_integer("window"),
        quantisation=read.text("quantisation"),
        weights=read.text("weights"),
    )


def _read_identity(read: FieldReader) -> PeerIdentity:
    return PeerIdentity(
        boot_id=read.text("boot_id"),
        pid_ns=read.text("pid_ns"),
        net_ns=read.text("net_ns"),
        pid=read.integer("pid"),
        start_time=read.integer("start_time"),
        host=read.text("host"),
        label=read.text("label"),
    )


def _offer_to_plain(offer: Offer) -> dict[str, Any]:
    able = offer.capabilities
    return {
        "name": offer.name,
        "protocol": offer.protocol,
        "devices": sorted(able.devices),
        "cross_host": able.cross_host,
        "authenticated": able.authenticated,
        "receive_into": able.receive_into,
        "full_duplex": able.full_duplex,
        "max_dims": able.max_dims,
        "latency_us": float(able.cost.latency_us),
        "gb_per_s": float(able.cost.gb_per_s),
        "viable": offer.probe.viable,
        "reason": peer_text(offer.probe.reason, MAX_TEXT),
        "domain": offer.probe.domain,
        "auto": offer.auto,
    }


def _read_offer(read: FieldReader) -> Offer:
    return Offer(
        name=read.text("name"),
        protocol=read.integer("protocol"),
        capabilities=Capabilities(
            devices=frozenset(read.texts("devices")),
            cross_host=read.boolean("cross_host"),
            authenticated=read.boolean("authenticated"),
            receive_into=read.boolean("receive_into"),
            full_duplex=read.boolean("full_duplex"),
            max_dims=read.optional_integer("max_dims"),
            cost=Cost(latency_us=read.positive("latency_us"), gb_per_s=read.positive("gb_per_s")),
        ),
        probe=Probe(viable=read.boolean("viable"), reason=read.text("reason"), domain=read.text("domain")),
        auto=read.boolean("auto"),
    )
