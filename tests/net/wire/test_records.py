"""Messages as attrs classes: what is written, and what is refused by its name."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

import attrs
import pytest
from msgspec import Meta

from kvplug.errors import LayoutError, WireError
from kvplug.net.wire import decode, encode, from_plain, to_plain


@attrs.frozen
class Part:
    size: Annotated[int, Meta(ge=1)]

    def __attrs_post_init__(self) -> None:
        if self.size == 13:
            raise LayoutError("13 is no size")

    @functools.cached_property
    def double(self) -> int:
        return 2 * self.size


@attrs.frozen(kw_only=True)
class Message:
    name: str = attrs.field(converter=str.strip)
    key: bytes = b""
    parts: tuple[Part, ...] = ()
    ranks: frozenset[int] = frozenset()
    data: Mapping[str, Any] = attrs.field(factory=dict, converter=MappingProxyType)
    limit: float | None = None


FULL = Message(
    name="m", key=b"\0\xff", parts=(Part(1), Part(2)), ranks=frozenset({3}), data={"a": [b"x"]}, limit=0.5
)


def test_a_message_crosses_the_wire_with_its_fields_and_nothing_else() -> None:
    assert FULL.parts[1].double == 4  # from now on kept in the object
    plain = decode(encode(to_plain(FULL)))
    assert plain["parts"] == ({"size": 1}, {"size": 2}) or plain["parts"] == [{"size": 1}, {"size": 2}]
    found = from_plain({**plain, "of a newer version": 1}, Message, "message")
    assert found == FULL and isinstance(found.data, MappingProxyType)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"name": 7}, r"message\.name: Expected `str`, got `int`"),
        ({"key": "AAAA"}, r"message\.key: Expected `bytes`, got `str`"),
        ({"parts": [{"size": 1}, {"size": 0}]}, r"message\.parts\[1\]\.size: Expected `int` >= 1"),
        ({"parts": [{"size": True}]}, r"message\.parts\[0\]\.size: Expected `int`, got `bool`"),
        ({"parts": [{}]}, r"message\.parts\[0\]: Object missing required field `size`"),
        ({"parts": [{"size": 13}]}, r"message\.parts\[0\]: 13 is no size"),
        ({"ranks": 3}, r"message\.ranks: Expected `array`"),
        ({"data": []}, r"message\.data: Expected `object`"),
    ],
)
def test_what_does_not_fit_is_refused_by_message_and_field(change: dict[str, Any], fault: str) -> None:
    with pytest.raises(WireError, match=fault):
        from_plain({**to_plain(FULL), **change}, Message, "message")


@pytest.mark.parametrize("plain", [None, 5, "m", [], b""])
def test_a_value_that_is_not_a_mapping_is_refused_with_the_error_class_of_the_caller(plain: Any) -> None:
    with pytest.raises(LayoutError, match="message: Expected `object`"):
        from_plain(plain, Message, "message", LayoutError)
