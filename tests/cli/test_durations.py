"""Times among the options of all commands that are installed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import click
import pytest
from click.testing import CliRunner
from click.types import FloatParamType, FuncParamType

from kvplug import Duration
from kvplug.cli.main import program

WRONG = ("nan", "inf", "-inf", "-1", "1e999", "1e12", "", "soon", "3 weeks", "0x10")


def options(
    command: click.Command, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Parameter]]:
    for each in command.params:
        yield path, each
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx := click.Context(command)):
            below = command.get_command(ctx, name)
            assert below is not None
            yield from options(below, (*path, name))


@cache
def every_option() -> list[tuple[tuple[str, ...], click.Parameter]]:
    return list(options(program))


def test_no_option_of_a_command_is_any_float() -> None:
    found = [(path, each.name) for path, each in every_option() if isinstance(each.type, FloatParamType)]
    assert not found, "give them the type kvplug.Duration: these accept nan"


def test_each_time_is_a_duration_which_refuses_what_no_call_can_wait_for() -> None:
    paths = {
        path
        for path, each in every_option()
        if isinstance(each.type, FuncParamType) and isinstance(each.type.func, Duration)
    }
    assert ("doctor",) in paths
    for wrong in WRONG:
        with pytest.raises(
            click.BadParameter, match=f"{re.escape(repr(wrong))} was given; allowed is a time "
        ):
            Duration()(wrong)
    done = CliRunner().invoke(program, ["doctor", "--timeout=nan"])
    assert done.exit_code == 2 and "'nan' was given; allowed is a time " in done.output


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 30.0), ("0.25", 0.25), ("500ms", 0.5), ("5 min", 300.0), (60.0, 60.0)]
)
def test_a_time_is_seconds_or_has_a_unit(text: str | float, seconds: float) -> None:
    assert Duration()(text) == seconds
