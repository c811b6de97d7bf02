"""A configuration's form: keys, types, bounds, and every fault at once."""

from __future__ import annotations

import contextlib

import attrs
import pytest
from hypothesis import given, strategies as st

from kvplug import Config, ConfigError
from kvplug.config.config import KEYS
from kvplug.config.options import describe_options
from kvplug.engine import Role


def faults_of(data: object) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(data)  # type: ignore[arg-type]
    return caught.value.faults


def test_every_fault_is_told_at_once() -> None:
    wrong = {
        "rol": ("producer", "not a known key; did you mean 'role'?"),
        "role": (
            "prodcer",
            "both (or none); did you mean 'producer'?",
        ),
        "port": (70000, "70000 was given; allowed is a whole number, at least 1 and at most 65535"),
        "buffer_size": ("64M", "write MB (powers of 1000) or MiB (powers of 1024)"),
        "timeout_s": (-1, '-1 was given; allowed is seconds, or a duration such as "500 ms", more than 0 s'),
        "device": ("CUDA 1", "'CUDA 1' was given"),
        "host": ("10.0.0.1:5000", "'10.0.0.1:5000' was given; allowed is a host alone"),
        "slow_path": ("wran", "allowed is one of warn, refuse or off; did you mean 'warn'?"),
        "staging_size": ("1 gib", "'gib' is not a unit of size; did you mean 'GiB'?"),
        "connector": ("auto", "a connector is not chosen automatically"),
    }
    faults = faults_of({key: value for key, (value, _) in wrong.items()} | {"options": {"cpu": 3}})
    said = {fault.partition(": ")[0]: fault.partition(": ")[2] for fault in faults}
    assert said.pop("options.cpu").startswith("3 was given; allowed is a table")
    assert len(faults) == len(wrong) + 1 and said.keys() == wrong.keys()
    assert not {key: text for key, text in said.items() if wrong[key][1] not in text}


@given(
    st.dictionaries(
        st.sampled_from(KEYS) | st.text(max_size=8), st.none() | st.text() | st.integers() | st.floats()
    )
)
def test_whatever_is_given_the_answer_is_a_config_or_config_error(data: dict[str, object]) -> None:
    with contextlib.suppress(ConfigError):
        config = Config.from_dict(data)
        assert attrs.evolve(config) == config


NAMES = ("transport", "queue", "lookup_buffer", "communicator", "connector")


RIGHT: dict[str, list[tuple[object, object]]] = {
    "buffer_size": [
        *(("1 GiB", 2**30), ("64MiB", 64 * 2**20), ("1.5 KiB", 1536), ("2 kB", 2000), ("4096", 4096)),
        *(("1e9", 10**9), ("1_000 B", 1000), (4096, 4096), (1e9, 10**9)),
    ],
    "connect_timeout_s": [("500 ms", 0.5), ("5 min", 300.0), ("2", 2.0), (7, 7.0), ("1 h", 3600)],
    "role": [(given, Role.PRODUCER) for given in ("producer", "kv_producer", Role.PRODUCER)],
    "device": [("zpu_one:3", "zpu_one:3")],  # of a backend outside torch
    **{key: [("kvplug-cpu:cpu", "kvplug-cpu:cpu")] for key in NAMES},
    "host": [
        (host, host)
        for host in (
            *("127.0.0.1", "0.0.0.0", "node-3.example.org", "::1", "fe80::1%eth0"),
            *("unix:@kvplug/a-1", "unix:/run/kvplug/a"),
        )
    ],
    "thread_cpus": [(cpus, cpus) for cpus in ("all", "inherit", "0", "0-3,8", "12,14-15")],
}


@pytest.mark.parametrize("key", RIGHT)
def test_a_value_is_taken_in_each_of_its_spellings(key: str) -> None:
    for given_, value in RIGHT[key]:
        assert getattr(Config.from_dict({key: given_}), key) == value


WRONG: dict[str, dict[object, str]] = {
    "buffer_size": dict.fromkeys(
        ("64M", "1 gib", "-1", "GiB", "1e100 TiB", "1..5 MB", "", True, 1.5, "nan", 0), "allowed is "
    ),
    "timeout_s": dict.fromkeys(
        (0, -1, float("inf"), float("nan"), "soon", "3 days", True, None, 10**400), "allowed is "
    ),
    "device": dict.fromkeys(("cuda 1", "CUDA", "cuda:", "0"), 'allowed is a device such as "cpu", "cuda" or'),
    "host": dict.fromkeys(
        ("", "a b", "tcp://127.0.0.1", "127.0.0.1:80", "[::1]", "unix:/", "unix:/a b", "unix:@", "a\n"), ""
    )
    | {"unix:/" + "a" * 89: "at most 89 bytes here; this one has 90", "unix:@" + "a" * 91: "bytes here"},
    "thread_cpus": dict.fromkeys(
        ("none", "0-", "-1", "0 3", "3-1", "0,5-4", "0x1", "1000000"), "was given; "
    ),
    **{key: {"Not A Name": "a name as `kvplug list` shows it"} for key in NAMES},
    "port": {"9" * 5000: "was given", 10**5000: "was given"},
}


@pytest.mark.parametrize("key", KEYS)
def test_a_wrong_value_is_one_short_fault_of_its_key(key: str) -> None:
    table = {"a": "table"}, " was given; allowed is "
    for wrong, said in [*WRONG.get(key, {}).items(), table]:
        (fault,) = faults_of({key: wrong})
        assert fault.startswith(f"{key}: ") and said in fault and len(fault) < 300, fault


def test_a_config_that_a_program_makes_is_checked_too() -> None:
    assert Config(role=Role.BOTH, timeout_s=5).role is Role.BOTH
    for wrong in (
        {"role": "both"},
        {"port": "5"},
        {"timeout_s": "5 s"},
        {"slow_path": "wran"},
        {"stores": "fs"},
    ):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))}: '.*' was given; allowed is "):
            Config(**wrong)  # type: ignore[arg-type]


def test_each_wrong_peer_is_named_with_the_other_faults() -> None:
    wrong = ["127.0.0.1", "::1", "::1:29555", "host:99999", "host:port", "host:1/x", "unix:@a b", "0.0.0.0:1"]
    faults = faults_of({"peers": [*wrong, "10.0.0.5:29555", "etcd://10.0.0.7"], "port": 0})
    assert len(faults) == len(wrong) + 1
    for each, fault in zip(wrong, faults, strict=False):
        assert fault.startswith(f"peers: {each!r} is not a"), fault


@pytest.mark.parametrize(
    ("host", "offset", "rank", "address"),
    [
        ("127.0.0.1", 0, 0, "127.0.0.1:29555"),
        ("127.0.0.1", 100, 3, "127.0.0.1:29658"),
        ("::1", 0, 1, "[::1]:29556"),
        ("unix:@a", 0, 2, "unix:@a-2"),
        ("unix:@a", 10, 2, "unix:@a-12"),
        ("unix:/run/a", 10, 2, "unix:/run/a-12"),
    ],
)
def test_each_rank_has_its_own_address(host: str, offset: int, rank: int, address: str) -> None:
    config = Config(host=host, port_offset=offset)
    assert config.control_address(rank) == address
    assert Config.address_beside(config.control_address(0), rank) == address


def test_an_offset_beyond_the_ports_is_refused_and_a_rank_beyond_them_has_no_address() -> None:
    (fault,) = faults_of({"host": "10.0.0.1", "port": 65000, "port_offset": 536})
    assert "rank 0 would listen at 65536" in fault
    assert Config(host="unix:@a", port=65000, port_offset=536)
    assert len(faults_of({"port": 0, "port_offset": 65535})) == 1, "they are compared once both are right"
    with pytest.raises(ConfigError, match="rank 9 would listen at port 65544"):
        Config(host="10.0.0.1", port=65535).control_address(9)


def test_a_heartbeat_that_outlasts_the_calls_is_refused_and_its_default_follows() -> None:
    (fault,) = faults_of({"heartbeat_timeout_s": 20, "timeout_s": 5})
    assert "at most timeout_s (5)" in fault
    assert Config(timeout_s=5).heartbeat_timeout_s == 5
    assert Config(timeout_s=60).heartbeat_timeout_s == 10


@pytest.mark.parametrize("key", ["secret", "password", "auth_token", "kvplug_secret", "sceret_"])
def test_a_secret_is_never_an_option_and_the_value_of_an_unknown_key_never_repeated(key: str) -> None:
    (fault,) = faults_of({key: "hunter2-hunter2"})
    assert ("KVPLUG_SECRET" in fault) == (key != "sceret_")
    assert "hunter2" not in fault


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"page_tokens": 16}, "not a known key; a plugin's options go into a table [options.NAME]"),
        ({"lookup": {"page_tokens": 16}}, "a plugin's options go into a table [options.lookup]"),
        ({"option": {"page_tokens": 16}}, "did you mean 'options'?"),
    ],
)
def test_options_outside_of_their_table_are_told_where_they_go(data: dict[str, object], said: str) -> None:
    (fault,) = faults_of(data)
    assert said in fault


def test_every_key_has_a_help_text() -> None:
    rows = [row for row in describe_options(Config) if row.name in KEYS]
    assert tuple(row.name for row in rows) == KEYS
    assert all(row.help and row.type and row.default for row in rows)
