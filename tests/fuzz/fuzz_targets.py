"""What reads bytes of peers: of the core, and of the plugins that are installed here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from fuzzing import Target

from kvplug.config.addresses import Address
from kvplug.negotiation.hello import EngineFacts, Hello, hello_from
from kvplug.negotiation.model import ModelInfo
from kvplug.negotiation.select import Offer
from kvplug.net.trust.identity import IDENTITY_SIZE, PeerIdentity, decode_identity, encode_identity
from kvplug.net.wire import decode, decode_out_of_band, encode, from_plain, to_plain
from kvplug.net.wire.frames import HEADER_SIZE, FrameKind, decode_header, encode_header
from kvplug.net.wire.tensors import TensorMeta, decode_meta, encode_meta
from kvplug.transport import PageEvent, PageFormat, PageSeal, QueueEndpoint, Series
from kvplug.transport.store.format import opaque_format

Targets = Mapping[str, tuple[Target, Sequence[bytes]]]
_SERIES = Series(opaque_format(64), b"rank 0", PageSeal().id)
_PAGE_EVENTS: tuple[Any, ...] = ({"kind": "stored"}, {"kind": "removed", "reason": PageEvent.Removal.EVICTED})
_HANDLE = QueueEndpoint.Handle(
    transport="shm", reader_ranks=(0,), local_reader_ranks=(0,), data={"contact": "c"}
)


def plain(read: Callable[[Any], object]) -> Target:
    """Of values: what the bytes encode is read."""
    return lambda data: read(decode(data))


def fixed(read: Callable[[bytes], object], size: int) -> Target:
    """Of structs: a reader gets as many bytes as it has asked for."""
    return lambda data: read(data[:size].ljust(size, b"\0"))


def _hello() -> Any:
    model = ModelInfo(name="m", num_layers=2, num_kv_heads=1, head_size=4, dtype="float32")
    facts = EngineFacts(
        role="consumer", model=model, layers=(0, 2), cache_layers=2, layout="KBTHD", block_size=16
    )
    hello = Hello(
        purpose="entries",
        engine=facts,
        transports=(Offer(name="net"),),
        identity=PeerIdentity.of_this_process(),
    )
    return to_plain(hello)


def _joining(read: Callable[[Any], object], peer_of: Callable[..., Any]) -> Target:
    """Of a queue's writer: the first frame of a reader on another host."""

    def target(data: bytes) -> None:
        connection = SimpleNamespace(
            describe="a peer",
            peer=PeerIdentity(pid=1, boot_id="another host"),
            receive_fds=lambda nbytes, *_: (data[:nbytes].ljust(nbytes, b"\0"), []),
        )
        with contextlib.closing(peer_of(connection, 1.0, None)) as peer:
            read(peer)

    return target


def _header(data: bytes) -> object:
    return PageSeal().check_header(_SERIES, b"tokens", data)


CORE: Targets = {
    "values": (
        decode,
        [encode(each) for each in (None, [1, -1, 2.5, "é", b"x"], {"a": {"b": [True, (1, 2)]}, 3: 2**63})],
    ),
    "heads": (
        lambda data: decode_out_of_band(data, memoryview(bytes(192))),
        # A list of a tensor of 12 bytes and an array of 68, which take 64 and 128.
        [bytes.fromhex("92 c70a11 0c01 0300000000000000 c70a12 0c01 1100000000000000")],
    ),
    "frames": (
        fixed(lambda data: decode_header(data, max_length=1 << 20), HEADER_SIZE),
        [bytes(encode_header(kind, 7)) for kind in FrameKind],
    ),
    "metas": (
        decode_meta,
        [encode_meta(TensorMeta("float32", (2, 3))), encode_meta(TensorMeta("uint1", ()))],
    ),
    "identities": (fixed(decode_identity, IDENTITY_SIZE), [encode_identity(PeerIdentity.of_this_process())]),
    "handshakes": (plain(hello_from), [encode(_hello())]),
    "contacts": (
        lambda data: Address.parse_contact(data.decode("utf-8", "surrogateescape")),
        [
            b"10.0.0.5:29555",
            b"[fe80::1%eth0]:1",
            b"unix:@name",
            b"unix:/run/x",
        ],
    ),
    "handles": (plain(QueueEndpoint.Handle.from_plain), [encode(_HANDLE.as_plain())]),
    "page-formats": (plain(PageFormat.from_plain), [encode(opaque_format(64).to_plain())]),
    "page-events": (
        plain(PageEvent.from_plain),
        [
            encode(PageEvent(epoch="e", seq=1, series=_SERIES.id, keys=(bytes(32),), **event).to_plain())
            for event in _PAGE_EVENTS
        ],
    ),
    "page-headers": (_header, [PageSeal().header(_SERIES, b"tokens", memoryview(bytes(64)))]),
}


def _of_plugins() -> dict[str, tuple[Target, Sequence[bytes]]]:
    found: dict[str, tuple[Target, Sequence[bytes]]] = {}
    with contextlib.suppress(ImportError):
        import torch

        from kvplug_lookup.buffer import messages
        from kvplug_lookup.buffer.entry import Description, Query
        from kvplug_lookup.connector.keys import Shard, StoreHello, hello_of

        def row(data: bytes) -> Any:
            return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else None

        entry = Description.of([1, 2], [True, False], b"", {"a": 1}, torch.zeros(1, 2, 3), None, None)
        said = [
            *(messages.Cancel(1), messages.End(), messages.Failed(1, "TimeoutError", "late")),
            *(messages.Find(1, Query.of([1], None, b""), 1.0), messages.Found(1, 7, entry)),
        ]
        packed = [bytes(messages.pack(each).tolist()) for each in said]
        found["lookup-messages"] = (lambda data: messages.unpack(row(data)), packed)
        shard = Shard(opaque_format(64), 0, 2, 0, 1)
        model = ModelInfo(name="m", num_layers=2, num_kv_heads=1, head_size=4, dtype="float32")
        hello = encode(hello_of(shard, model, "host", bytes(16)))
        found["store-hellos"] = (plain(StoreHello.from_plain), [hello])
    with contextlib.suppress(ImportError):
        from kvplug_shm.joining import JoiningPeer
        from kvplug_shm.queue import join

        asks = encode({"queue": "q", "rank": 0, "terms": [True, 1000]})
        first = len(asks).to_bytes(2, "little") + asks
        found["queue-joins"] = (_joining(join.asked, JoiningPeer), [first])
    with contextlib.suppress(ImportError):
        from kvplug_cuda_ipc.pipe.join import Hello

        ours = Hello(gpu="g", token=bytes(16), handle=bytes(64), nbytes=64)
        joins = plain(lambda value: from_plain(value, Hello, "it"))
        found["cuda-ipc-joins"] = (joins, [encode(to_plain(ours))])
    return found


PLUGINS: Targets = _of_plugins()
ALL: Targets = {**CORE, **PLUGINS}
