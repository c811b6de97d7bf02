"""The reference pages of the wire and the handshake say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import attrs

from kvplug.negotiation.exchange import MAX_HELLO_BYTES
from kvplug.negotiation.hello import MAX_LIST, MAX_TEXT, EngineFacts, Hello
from kvplug.negotiation.model import ModelInfo
from kvplug.net.wire import frames, validate, values
from kvplug.net.wire.tensors import DTYPES, MAX_DIMS

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
WIRE = (REFERENCE / "wire.md").read_text(encoding="utf-8")
HANDSHAKE = (REFERENCE / "handshake.md").read_text(encoding="utf-8")


def documented_dtypes() -> dict[str, int]:
    table = WIRE[WIRE.index("## Tensors") :]
    found = {name: int(code) for code, name in re.findall(r"\| (\d+) \| (\w+) (?=\|)", table)}
    for first, last, kind in re.findall(r"\| (\d+) to (\d+) \| (u?int)1 to ", table):
        found |= {f"{kind}{1 + i}": int(first) + i for i in range(int(last) - int(first) + 1)}
    listed = re.search(r"48 to 52 are (\w+), (\w+), (\w+), (\w+) and (\w+)\.", table)
    assert listed is not None
    return found | {name: 48 + i for i, name in enumerate(listed.groups())}


def test_every_dtype_is_documented_with_its_code() -> None:
    assert documented_dtypes() == {name: code for name, (code, _) in DTYPES.items()}


def test_every_frame_kind_and_the_version_are_documented() -> None:
    found = dict(re.findall(r"\| `([A-Z]+)` \| (\d+) \|", WIRE))
    assert found == {kind.name: str(int(kind)) for kind in frames.FrameKind}
    assert f"This is version {frames.MAJOR}.{frames.MINOR}." in WIRE


def test_the_bounds_are_documented() -> None:
    limits = validate.DEFAULT_LIMITS
    for shown in (
        f"| {limits.max_bytes >> 20} MiB |",
        f"| {limits.max_depth} |",
        f"| {limits.max_items:,} |",
        f"{validate.FIXED_COST >> 10} KiB + 6 bytes per byte of message + {validate.ITEM_COST} bytes per el",
        f"at most {MAX_DIMS})",
    ):
        assert shown in WIRE, shown
    assert f"at most {MAX_HELLO_BYTES >> 10} KiB, its texts {MAX_TEXT:,}" in HANDSHAKE
    assert f"its lists {MAX_LIST} elements" in HANDSHAKE


def test_every_leaf_is_documented_with_its_number() -> None:
    assert {int(code) for code in re.findall(r"\| extension (\d+)[:,]", WIRE)} == {*map(int, validate.Leaf)}
    section = WIRE[WIRE.index("## Values with memories out of band") : WIRE.index("## Tensors")]
    assert f"at least {values.MIN_BYTES:,} bytes" in section
    assert f"multiple of {values.ALIGNMENT} " in section


def test_every_field_of_a_hello_is_documented() -> None:
    fields = [field.name for cls in (Hello, EngineFacts, ModelInfo) for field in attrs.fields(cls)]
    table = HANDSHAKE[HANDSHAKE.index("## Fields") : HANDSHAKE.index("## Integrity")]
    missing = [name for name in fields if not re.search(rf"\b{name}\b", table)]
    assert not missing
