"""``kvplug explain``: every step of a config with its reason; nothing is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvplug import Config, ConfigError, Registry, check_config
from kvplug.assembly.doctor.diagnosis import Examination
from kvplug.assembly.doctor.stores import of_stores
from kvplug.assembly.resolve import ResolvedConfig
from kvplug.engine import Role
from kvplug.transport import Deadline


def explained(site: Any, *arguments: str, **environment: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """The exit code, and the steps by topic."""
    done = site.kvplug("explain", "--json", *arguments, **environment)
    assert not done.stderr, done.stderr
    steps: dict[str, list[dict[str, Any]]] = {}
    for step in json.loads(done.stdout):
        steps.setdefault(step["topic"], []).append(step)
    return done.returncode, steps


def test_a_config_that_works_says_what_is_taken_and_why_and_makes_nothing(site: Any, tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    code, steps = explained(
        site, "role=both", "stores=host,fs", f"options.fs.path={folder}", "host=unix:@explained"
    )
    assert code == 0
    assert not [step for topic in steps.values() for step in topic if step["verdict"] == "problem"]
    assert "listens at unix:@explained-0: only processes of this host" in steps["host"][0]["what"]
    assert [step["what"].partition(" from ")[0] for step in steps["stores"]] == ["host", "fs"]
    (transport,) = steps["transport"]
    assert "go by shm: the cheapest that can" in transport["what"]
    assert any(detail.startswith("cpu: could be used, but claims") for detail in transport["why"])
    assert any("pynccl: cannot work here" in detail for detail in transport["why"])
    assert not any("at the peer" in detail for detail in transport["why"])
    assert steps["queue"][0]["what"].startswith("shm from kvplug-shm")
    assert steps["communicator"][0]["what"].startswith("shm from kvplug-shm")
    assert not folder.exists()


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_a_connector_that_uses_a_lookup_buffer_says_which_and_no_store(site: Any, role: str) -> None:
    code, steps = explained(site, "connector=simple", f"role={role}", "host=unix:@x", "buffer_size=64 MiB")
    assert code == 0, steps
    assert "stores" not in steps
    assert ": KV entries" in steps["lookup_buffer"][0]["what"]
    assert ("memory" in steps) == (role == "producer"), "a consumer holds no entries"


def test_a_connector_that_hashes_nothing_on_a_device_is_said_not_to_notice_corruption(site: Any) -> None:
    given = ["connector=p2p", "role=consumer", "host=unix:@x"]
    _, on_cpu = explained(site, *given)
    _, on_gpu = explained(site, *given, "device=cuda")
    assert on_cpu["integrity"][0]["verdict"] == "ok"
    assert (on_gpu["integrity"][0]["verdict"], "not detected" in on_gpu["integrity"][0]["what"]) == (
        "note",
        True,
    )


def test_the_doctor_opens_no_store_of_a_connector_that_uses_none() -> None:
    config = Config(connector="simple", role=Role.PRODUCER, stores=("host",))
    resolved = ResolvedConfig(config, Registry.from_env())
    assert not [*of_stores(Examination(resolved=resolved, deadline=Deadline.after(10), write=True))]


@pytest.mark.parametrize(
    ("arguments", "topic", "said"),
    [
        ("", "role", "set it to producer, consumer or both"),
        ("role=both host=10.0.0.4", "secret", "`kvplug config secret FILE` makes one"),
        ("role=both stores=fs", "options.fs.path", "must be given"),
        ("role=both stores=fd", "stores", "no store named 'fd'"),
        ("role=both lookup_buffer=simple", "lookup_buffer", "'lookup' uses no lookup buffer; 'simple' does"),
        ("role=both transport=pynccl", "transport", "'pynccl' is named here and cannot be used"),
        ("role=both communicator=pynccl", "communicator", "no communicator is available"),
        ("role=bath", "config", "role: 'bath' was given"),
        ("role=both tracing=zipkin", "tracing", "no installed package offers the exporter 'zipkin'"),
        ("role=both host=10.0.0.4 port=65535 port_offset=1", "config", "rank 0 would listen at 65536"),
    ],
)
def test_what_would_not_work_is_a_problem(site: Any, arguments: str, topic: str, said: str) -> None:
    code, steps = explained(site, *arguments.split())
    assert code == 1
    assert any(step["verdict"] == "problem" and said in step["what"] for step in steps[topic]), steps


WRONG = """
role = "both"
stores = []
peers = ["etcd://10.0.0.7:99999"]
thread_cpus = "0,99998-99999"
[options.fs]
path = ""
[options.redis]
address = ["10.0.0.7:port"]
[options.mooncake]
master = "10.0.0.7"
[options.nixl]
endpoint = "http://10.0.0.7:99999"
path = ""
[options.lookup]
events = "tcp://127.0.0.1"
events_replay = "127.0.0.1:5557"
[options.host]
contact = "unix:@a b"
socket = "/run/%s"
""" % ("a" * 120)  # fmt: skip
FAULTS = (
    ("stores", "nothing was given; 'lookup' saves into a store, such as 'host'"),
    ("peers", "'10.0.0.7:99999' is not an address: a port is at most 65535"),
    ("thread_cpus", "without 99998-99999"),
    ("options.fs.path", "must be given"),
    ("options.redis.address", "'10.0.0.7:port' is not an address: 'port' is not a port"),
    ("options.mooncake.master", "'10.0.0.7' is not an address: the port is missing"),
    ("options.nixl.endpoint", "'10.0.0.7:99999' is not an address"),
    ("options.nixl.path", "allowed is the path of a folder"),
    ("options.lookup.events", "is not an address"),
    ("options.lookup.events_replay", 'allowed is an address such as "tcp://127.0.0.1:5557"'),
    ("options.host.contact", "'unix:@a b' is not an address"),
    ("options.host.socket", "the path of a Unix socket may have at most 107 bytes here; this one has 125"),
)


def test_every_wrong_address_is_said_by_check_by_explain_and_at_start(site: Any, tmp_path: Path) -> None:
    path = tmp_path / "kvplug.toml"
    path.write_text(WRONG)
    checked = site.kvplug("config", "check", str(path))
    code, steps = explained(site, "--config", str(path))
    with pytest.raises(ConfigError) as caught:
        check_config(Config.load(path, environ={}))
    assert (checked.returncode, code) == (1, 1)
    for key, text in FAULTS:
        assert any(f"{key}: " in line and text in line for line in checked.stderr.splitlines()), key
        assert any(step["verdict"] == "problem" and text in step["what"] for step in steps[key]), key
        assert any(fault.startswith(f"{key}: ") and text in fault for fault in caught.value.faults), key
    assert len(caught.value.faults) == len(FAULTS)


def test_an_address_that_others_do_not_reach_is_not_announced_where_they_look(site: Any) -> None:
    def problems(*given: str) -> list[str]:
        _, steps = explained(site, "role=both", "peers=redis://198.51.100.7:6379/0", *given)
        return [step["what"] for of in steps.values() for step in of if step["verdict"] == "problem"]

    assert any("unix:@kvplug-0 would be announced" in text for text in problems())
    assert not problems("role=consumer")
    assert not problems("stores=fs", "options.fs.path=/var/kv"), "it announces nothing"
    assert not problems("peers=redis://127.0.0.1:6379/0")


def test_between_hosts_only_what_reaches_them_is_taken(site: Any) -> None:
    code, steps = explained(
        site, "role=both", "host=10.0.0.4", "peers=10.0.0.5:29555", KVPLUG_SECRET="s" * 32
    )
    assert code == 0
    here, there = (step["what"] for step in steps["transport"])
    assert "on this host go by shm" in here
    assert "on another host go by cpu" in there
