"""What an author's class sets: options of what is not installed, and what it must set."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from kvplug import ConfigError
from kvplug.transport import option
from kvplug_testing import ConnectorContract, DeviceCommunicatorContract, PipeContract

FAILED = pytest.fail.Exception


@attrs.frozen(kw_only=True)
class Options:
    lanes: int = option(2, help="How many there are.", at_least=1)
    max_in_flight_bytes: int = option(1 << 20, help="What may be unsent.", unit="bytes", at_least=1)


class Pipe(PipeContract):
    """Of a transport that is not installed: its endpoint is the context that it was made with."""

    def make_endpoint(self, context: Any) -> Any:
        return context


class PipeWithOptions(Pipe):
    options_class = Options
    options = {"lanes": "3"}  # noqa: RUF012


def test_options_of_what_is_not_installed_are_made_as_a_config_makes_them() -> None:
    suite = PipeWithOptions()
    made: Any = suite.endpoint(2000)
    assert made.options == Options(lanes=3, max_in_flight_bytes=2000)
    with pytest.raises(ConfigError, match=r"options\.PipeWithOptions\.lane"):
        suite.made_options(lane=1)


@pytest.mark.parametrize(
    ("suite", "use", "message"),
    [
        (PipeContract, lambda s: s.pair(), "`transport` .* an installed pipe, or override `make_endpoint`"),
        (DeviceCommunicatorContract, lambda s: s.made(None), "communicator, or override `make_communicator`"),
        (ConnectorContract, lambda s: s.both(), "set `connector` to the name of an installed connector$"),
    ],
)
def test_a_class_without_a_subject_fails_with_what_to_set(suite: Any, use: Any, message: str) -> None:
    mine = type("TestMine", (suite,), {})()
    with pytest.raises(FAILED, match=f"TestMine has no subject: .*{message}"):
        use(mine)
