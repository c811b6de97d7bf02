"""What the command line names is judged as in a class of its author."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kvplug import ConfigError
from kvplug.transport.spec import Kind
from kvplug_testing.contract import suites


def test_a_transport_that_does_not_leave_its_process_is_judged_in_one() -> None:
    memory = suites.installed(["pipe:memory"], [])[0]
    assert memory.transport == "memory"
    assert not memory.across_processes


@pytest.mark.parametrize("name", ["lookup_buffer:simple", "lookup buffer:simple"])
def test_a_kind_is_named_as_in_a_config_or_as_a_list_prints_it(name: str) -> None:
    pytest.importorskip("kvplug_lookup")
    assert suites.installed([name], [])[0].kind is Kind.LOOKUP_BUFFER


def judged(*options: str, transports: Iterable[str] = ("pipe:memory",)) -> type[suites.Contract]:
    return suites.installed(transports, [], options)[0]


@pytest.mark.parametrize("name", ["memory", "pipe:memory"])
def test_options_of_what_is_judged_are_given_by_its_name(name: str) -> None:
    made = judged(f"{name}.max_in_flight_bytes=2 MiB", f"{name}.eager=false")().made_options()
    assert made.max_in_flight_bytes == 2 * 1024 * 1024
    assert not made.eager


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("memory.eagr=false", "did you mean 'eager'"),
        ("memory.eager=perhaps", "options.memory.eager"),
        ("eager=false", "allowed is NAME.KEY=VALUE"),
        ("cpu.lanes=2", "options of cpu were given, and no such thing is judged"),
    ],
)
def test_a_wrong_option_is_an_error_at_once(option: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        judged(option)


def test_a_store_is_judged_by_its_name() -> None:
    suite = suites.installed([], [], ["memory.path=/a"], stores=["memory"])[0]
    assert (suite.__name__, suite.subject()) == ("TestMemoryStoreContract", "store memory")
    assert suite().made_options().path == "/a"
