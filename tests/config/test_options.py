"""Options classes: filled from what an operator wrote, and described."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest
from hypothesis import given, strategies as st

from kvplug import ConfigError
from kvplug.config.options import OptionRow, check_options, describe_options
from kvplug.config.units import format_bytes, parse_bytes
from kvplug.transport import option


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@attrs.frozen(kw_only=True)
class Options:
    """One of each sort."""

    lanes: int = option(2, help="How many.", at_least=1, at_most=4)
    limit: int = option(2**20, help="How much\n    at once.", unit="bytes", at_least=1)
    wait: float = option(1.5, help="How long.", unit="seconds", above=0)
    ratio: float = option(0.5, help="A share.")
    fast: bool = option(False, help="Whether.")
    colour: Colour = option(Colour.RED, help="Which.")  # noqa: RUF009 - attrs copies nothing of an enum
    evict: Literal["never", "oldest"] = option("never", help="What goes.")
    ttl_s: float | None = option(
        None,
        help="For how long.",
        unit="seconds",
        validator=attrs.validators.optional(attrs.validators.ge(0)),
    )
    hosts: tuple[str, ...] = option((), help="Which.")
    table: Mapping[str, int] = option(attrs.Factory(dict), help="More.")
    number: int | str = option(1, help="Either.")


@attrs.frozen(kw_only=True)
class Converting:
    """It converts by itself."""

    folder: Path = attrs.field(converter=Path)


def test_a_class_may_convert_by_itself() -> None:
    assert check_options(Converting, {"folder": "a/b"}) == Converting(folder="a/b")
    with pytest.raises(ConfigError, match=r"options\.x: "):
        check_options(Converting, {"folder": 3}, where="options.x")


def faults_of(values: Mapping[str, Any], cls: type = Options) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        check_options(cls, values, where="options.cpu")
    return caught.value.faults


def test_text_is_converted_as_the_types_say() -> None:
    given = {
        "lanes": ("3", 3),
        "limit": ("64 KiB", 65536),
        "wait": ("500 ms", 0.5),
        "ratio": ("1e-3", 0.001),
        "fast": ("yes", True),
        "colour": ("blue", Colour.BLUE),
        "evict": ("oldest", "oldest"),
        "ttl_s": ("none", None),
        "hosts": ("a, b", ("a", "b")),
        "number": ("x", "x"),
    }
    found = check_options(Options, {key: text for key, (text, _) in given.items()})
    assert found == Options(**{key: value for key, (_, value) in given.items()})


def test_values_of_the_right_type_pass_as_they_are() -> None:
    given = {"lanes": 1, "wait": 2, "fast": True, "colour": Colour.BLUE, "hosts": ["a"], "table": {"a": 1}}
    options = check_options(Options, {**given, "ttl_s": 5})
    assert options == Options(**{**given, "wait": 2.0, "hosts": ("a",), "ttl_s": 5})
    assert isinstance(options.wait, float)
    assert check_options(Options, {}) == Options()


FAULTS: list[tuple[str, object, str]] = [
    ("lanes", 9, "options.cpu.lanes: 9 was given; allowed is a whole number, at least 1 and at most 4"),
    ("lanes", "two", "allowed is a whole number, at least 1 and at most 4"),
    ("lanes", True, "True was given"),
    ("lanes", 1.5, "1.5 was given"),
    ("limit", "64M", "write MB (powers of 1000) or MiB (powers of 1024)"),
    ("wait", 0, "more than 0 s"),
    ("wait", "1 week", "units are us, ms, s, min, h"),
    ("ratio", "half", "allowed is a number"),
    ("fast", "maybe", "allowed is true or false"),
    ("fast", 1, "allowed is true or false"),
    ("colour", "bleu", "allowed is one of red or blue; did you mean 'blue'?"),
    ("evict", "oldst", "allowed is one of never or oldest; did you mean 'oldest'?"),
    ("ttl_s", -1, "'ttl_s' must be >= 0"),
    ("hosts", 7, "allowed is a list of text"),
    ("hosts", [7], "allowed is a list of text"),
    ("table", 7, "a table of names and values"),
    ("number", 1.5, "allowed is a whole number or text"),
    ("lane", 1, "options.cpu.lane: not a known key; did you mean 'lanes'?"),
    ("zzz", 1, "known are colour, evict"),
]


def test_a_fault_names_key_value_and_what_is_allowed_and_all_are_told_at_once() -> None:
    for key, value, part in FAULTS:
        (fault,) = faults_of({key: value})
        assert fault.startswith(f"options.cpu.{key}: ")
        assert part in fault
    every = {key: value for key, value, _ in FAULTS}
    assert len(faults_of(every)) == len(every)
    with pytest.raises(
        ConfigError, match="lanes: 9 was given; allowed is a whole number, at least 1 and at most 4"
    ):
        Options(lanes=9)


def test_options_are_described_for_people() -> None:
    rows = {row.name: row for row in describe_options(Options)}
    assert rows["limit"] == OptionRow(
        name="limit",
        type="whole number, at least 1 B",
        unit="bytes",
        default="1 MiB",
        help="How much at once.",
    )
    assert (rows["colour"].type, rows["ttl_s"].type) == ("one of red or blue", "number (or none)")
    assert (rows["hosts"].default, rows["wait"].default) == ("nothing", "1.5 s")


@given(st.integers(0, 2**60))
def test_a_size_survives_being_written_and_read(nbytes: int) -> None:
    assert parse_bytes(format_bytes(nbytes)) == nbytes
