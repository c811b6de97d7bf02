"""Mutated frames through the decoder: nothing but WireError, no memory beyond the bound."""

from __future__ import annotations

import contextlib
import gc
import random
import struct
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvplug.errors import WireError
from kvplug.net.wire.frames import HEADER_SIZE, FrameKind, decode_header, encode_header
from kvplug.net.wire.out_of_band import aligned, decode_out_of_band
from kvplug.net.wire.tensors import TensorMeta, decode_meta, encode_meta
from kvplug.net.wire.validate import Limits
from kvplug.net.wire.values import decode, encode

LIMITS = Limits(max_bytes=64 << 10, max_depth=16, max_items=4096)


def ext(code: int, payload: bytes) -> bytes:
    return struct.pack(">BIB", 0xC9, len(payload), code) + payload


def tensor(dtype: str, *shape: int) -> bytes:
    meta = TensorMeta(dtype, shape)
    return encode_meta(meta) + bytes(i % 251 for i in range(meta.nbytes))


def frame(kind: FrameKind, payload: bytes) -> bytes:
    return encode_header(kind, len(payload)) + payload


MARK = b"\xc7\x00"
CORPUS = [
    frame(
        FrameKind.VALUE, encode({"kind": "stored", "seq": 7, "tokens": b"\x01" * 64, "parts": (1, [2, 3])})
    ),
    frame(
        FrameKind.VALUE, encode([None, True, -1, 2**63, 1.5, "é", b"x", (), {}, set(), frozenset({1, (2,)})])
    ),
    frame(FrameKind.VALUE, encode({(1, 2): {3, 4}, None: [{"a": {"b": [[[(1,)]]]}}], 1.5: {b"k": "v" * 40}})),
    frame(FrameKind.VALUE, encode([list(range(200)), tuple("abcdefghij"), {i: str(i) for i in range(30)}])),
    frame(FrameKind.VALUE, encode(b"y" * 700)),
    frame(
        FrameKind.VALUE,
        b"\x93" + ext(16, b"\x0b") + ext(17, tensor("bfloat16", 2, 3)) + ext(18, tensor("int64", 4)),
    ),
    frame(FrameKind.VALUE, ext(17, tensor("float8_e5m2", 2, 1, 5))),
    frame(FrameKind.VALUE, ext(18, tensor("float32", 0, 3))),
    frame(FrameKind.TENSOR, encode_meta(TensorMeta("bfloat16", (30, 16, 3, 64)))),
    frame(FrameKind.TENSOR, encode_meta(TensorMeta("int64", ()))),
    frame(FrameKind.NONE, b""),
]
"""Valid frames. Tensors are written by hand, so that this needs no torch."""

TELLING = bytes(
    [0x80, 0x81, 0x90, 0x91, 0xC1, 0xC4, 0xC6, 0xC7, 0xC9, 0xD4, 0xD8, 0xDB, 0xDD, 0xDE, 0xDF, 0xFF, 0]
)
"""Bytes that begin or lengthen something."""


def mutated(rng: random.Random) -> bytes:
    # The header is hit now and then; mostly it is kept, so that the payload gets its share.
    start = 0 if rng.random() < 0.15 else HEADER_SIZE
    return mutate(rng, rng.choice(CORPUS), start, CORPUS)


def mutate(rng: random.Random, sound: bytes, start: int, corpus: list[bytes]) -> bytes:
    data = bytearray(sound)
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        at = rng.randrange(start, len(data) + 1) if len(data) > start else start
        match rng.randrange(8):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                if at < len(data):
                    data[at] ^= 1 << rng.randrange(8)
            case 2:
                del data[at:]
            case 3:
                data[at : at + 1] = bytes([rng.choice(TELLING)])
            case 4:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 5:
                data[at : at + 5] = bytes([rng.choice(TELLING)]) + rng.choice(
                    (b"\xff" * 4, b"\x7f\xff\xff\xff")
                )
            case 6:
                other = rng.choice(corpus)
                data[at:] = other[rng.randrange(len(other)) :]
            case 7:
                data[at:at] = data[start : start + rng.randrange(1, 40)] * rng.randrange(1, 20)
    return bytes(data)


def read(data: bytes) -> None:
    """What a receiver does with a frame."""
    header = decode_header(data, max_length=LIMITS.max_bytes)
    payload = memoryview(data)[HEADER_SIZE:]
    if header.kind is FrameKind.TENSOR:
        decode_meta(payload)
    else:
        decode(payload, limits=LIMITS)


def storm(count: int, one: Callable[[], tuple[Callable[[], object], int, str]]) -> int:
    """Make ``count`` readings with ``one``: what reads, how many bytes, and a note. How many were sound."""
    gc.collect()
    tracemalloc.start()
    try:
        return sum(within_the_bound(*one()) for _ in range(count))
    finally:
        tracemalloc.stop()


def storm_of_frames(count: int, seed: int) -> int:
    rng = random.Random(seed)
    for data in CORPUS:  # imports of torch and numpy, where they are, come before memory is counted
        with contextlib.suppress(WireError):
            read(data)

    def one() -> tuple[Callable[[], object], int, str]:
        data = mutated(rng)
        return partial(read, data), len(data), f"a frame of seed {seed}: {data.hex()}"

    return storm(count, one)


def within_the_bound(read: Callable[[], object], nbytes: int, note: str) -> bool:
    """Whether what is read is sound. It takes no more memory than ``nbytes`` may, sound or not.

    What takes more is read once more: a table of the interpreter's own may have grown just then.
    """
    sound, peak = measured(read, note)
    if peak > LIMITS.memory_bound(nbytes):
        sound, peak = measured(read, note)
    assert peak <= LIMITS.memory_bound(nbytes), f"{peak} bytes, {note}"
    return sound


def measured(read: Callable[[], object], note: str) -> tuple[bool, int]:
    """Whether what is read is sound, and how many bytes were in use at most meanwhile."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        read()
        sound = True
    except WireError:
        sound = False
    except BaseException as e:
        e.add_note(note)
        raise
    return sound, tracemalloc.get_traced_memory()[1] - before


COUNT = 2_000


@pytest.mark.filterwarnings("ignore")  # torch warns of complex32, and numpy of nothing we could use
def test_mutated_frames_raise_nothing_but_wire_error_and_stay_within_the_bound() -> None:
    fine = storm_of_frames(COUNT, seed=1)
    assert 0 < fine < 0.9 * COUNT  # neither all refused at the door, nor hardly mutated


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 20))
@pytest.mark.filterwarnings("ignore")
def test_a_million_mutated_frames_raise_nothing_but_wire_error_and_stay_within_the_bound(seed: int) -> None:
    assert storm_of_frames(100_000, seed) > 0  # each of ten times


def apart(code: int, dtype: str, *shape: int) -> bytes:
    return ext(code, encode_meta(TensorMeta(dtype, shape)))


HEADS = {
    apart(19, "bfloat16", 2, 3): 64,
    b"\x92" + apart(19, "float32", 40) + apart(20, "int64", 0, 9): 192,
    b"\x94" + ext(17, tensor("int8", 3)) + apart(20, "float16", 4, 5) + ext(16, b"\x0b") + b"\x01": 64,
    b"\x93" + MARK + b"\x04" + apart(19, "uint8") + b"\x92" + apart(20, "bool", 1, 1) + b"\xa1k": 128,
    b"\x81\xa2kv\x98" + apart(20, "float64", 7) * 8: 512,
    encode({"step": 7, "parts": (1, [2, 3], b"\x01" * 30)}): 0,
}
"""Sound heads, and how many bytes their memories take."""


def mutated_apart(rng: random.Random) -> tuple[bytes, memoryview]:
    head, nbytes = rng.choice(list(HEADS.items()))
    if rng.random() < 0.8:
        head = mutate(rng, head, 0, list(HEADS))
    if rng.random() < 0.4:
        nbytes = max(0, nbytes + rng.choice((-64, -1, 1, 64, 128, 4096)))
    return head, memoryview(rng.randbytes(nbytes))


@pytest.mark.filterwarnings("ignore")
def test_mutated_heads_and_memories_raise_nothing_but_wire_error_and_stay_within_the_bound() -> None:
    rng = random.Random(2)
    for head, nbytes in HEADS.items():  # imports come before memory is counted
        with contextlib.suppress(WireError):  # neither torch nor numpy here
            decode_out_of_band(head, memoryview(bytes(nbytes)))

    def one() -> tuple[Callable[[], object], int, str]:
        head, memories = mutated_apart(rng)
        return (
            partial(decode_out_of_band, head, memories, limits=LIMITS),
            len(head) + memories.nbytes,
            f"{memories.nbytes} bytes of memories, head: {head.hex()}",
        )

    assert 0 < storm(COUNT, one) < 0.9 * COUNT


def at_most(read: Callable[[], Any], nbytes: int) -> Any:
    """What ``read`` returns, with no more memory in use at any time than ``nbytes`` may take."""
    gc.collect()
    tracemalloc.start()
    try:
        value = read()
        assert tracemalloc.get_traced_memory()[1] <= LIMITS.memory_bound(nbytes)
    finally:
        tracemalloc.stop()
    return value


def apart_dense(element: bytes, nbytes: int) -> tuple[bytes, int]:
    """As many leaves as the bound of bytes allows, and what their memories take."""
    count = min(LIMITS.max_items, (LIMITS.max_bytes - 16) // (len(element) + nbytes))
    return b"\xdd" + count.to_bytes(4, "big") + element * count, count * aligned(nbytes)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("uint8", ()),
        ("uint8", (0,)),
        ("float64", ()),
        ("uint8", (0, *(1,) * 62)),
        ("uint8", (0, *(300,) * 6)),
    ],
    ids=str,
)
def test_the_most_that_a_head_of_arrays_can_become_is_within_the_bound(
    dtype: str, shape: tuple[int, ...]
) -> None:
    np = pytest.importorskip("numpy")
    head, nbytes = apart_dense(apart(20, dtype, *shape), TensorMeta(dtype, shape).nbytes)
    memories = memoryview(bytes(nbytes))
    value = at_most(lambda: decode_out_of_band(head, memories, limits=LIMITS), len(head) + nbytes)
    assert type(value[-1]) is np.ndarray and value[-1].shape == shape


DENSE = {
    "nothing but nil": (b"\xdc\x0f\xff", b"\xc0"),
    "empty lists": (b"\xdc\x0f\xff", b"\x90"),
    "empty dicts": (b"\xdc\x0f\xff", b"\x80"),
    "empty tuples": (b"\xdc\x07\xff", b"\x91" + MARK + b"\x01"),
    "empty sets": (b"\xdc\x07\xff", b"\x91" + MARK + b"\x02"),
    "empty frozensets": (b"\xdc\x07\xff", b"\x91" + MARK + b"\x03"),
    "empty tagged dicts": (b"\xdc\x07\xff", b"\x91" + MARK + b"\x04"),
    "dicts of one": (b"\xdc\x05\x55", b"\x81\xc0\xc0"),
    "sets of one": (b"\xdc\x05\x55", b"\x92" + MARK + b"\x02\xc0"),
    "tagged dicts of one": (b"\xdc\x03\xff", b"\x93" + MARK + b"\x04\xc0\xc0"),
    "small integers": (b"\xdc\x0f\xff", b"\xe0"),
    "two-byte texts": (b"\xdc\x0f\xff", b"\xa2\xc3\xa9"),
    "dicts within dicts": (b"\xdc\x00\x80", b"\x81\xc0" * 14 + b"\x80"),
}


@pytest.mark.parametrize(("head", "element"), DENSE.values(), ids=DENSE)
def test_the_most_that_a_message_can_become_is_within_the_bound(head: bytes, element: bytes) -> None:
    count = int.from_bytes(head[1:], "big")
    data = head + element * count
    assert len(at_most(lambda: decode(data, limits=LIMITS), len(data))) == count


def test_text_that_grows_when_decoded_is_within_the_bound() -> None:
    text = encode("a" * 50_000 + "\U0001f600")  # one wide character makes all of them wide
    at_most(lambda: decode(text, limits=LIMITS), len(text))
