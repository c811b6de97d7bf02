"""Ranks of the communicator "cpu" that die or stop in the middle, process groups of torch, and addresses."""

from __future__ import annotations

import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import cpu_ranks
from communicator_ranks import at_all, check_joiners, check_survivors
from kvplug import (
    ClosedError,
    Config,
    ConfigError,
    PluginError,
    StatelessGroup,
    TimeoutError,
    TransportError,
    build_communicator,
)
from kvplug.transport import Deadline, WireError
from kvplug_cpu.gloo import Gloo
from kvplug_cpu.interface import address_of
from kvplug_cpu.store import GroupStore
from kvplug_testing.resources import Resources
from kvplug_testing.waits import Call, until

STOP, KILL = int(signal.SIGSTOP), int(signal.SIGKILL)
RANKS = cpu_ranks.__file__


@pytest.mark.parametrize(
    ("method", "fault", "kind", "timeout"),
    [
        ("all_reduce", KILL, "PeerGoneError", None),
        ("all_reduce", STOP, "TimeoutError", 1.0),
        ("batch_isend_irecv", STOP, "TimeoutError", 1.0),
    ],
)
def test_a_rank_that_is_struck_in_the_middle_is_named_and_the_others_go_on_without_it(
    ranks: Any, method: str, fault: int, kind: str, timeout: float | None
) -> None:
    children = ranks("survivor", RANKS, 3, {}, method, timeout, fault)
    check_survivors(
        children, kind, named=method != "batch_isend_irecv"
    )  # there a waiting one may be the first


@pytest.mark.full
@pytest.mark.timing
@pytest.mark.parametrize(
    ("when", "who", "fault", "kinds"),
    [
        ("pipes", 2, KILL, ["TimeoutError", "PeerGoneError"]),
        ("gloo", 2, STOP, ["TimeoutError"]),
        # It keeps the group's store, which itself would wait for 30 s.
        ("gloo", 0, STOP, ["TimeoutError"]),
    ],
)
def test_a_rank_that_is_struck_while_the_ranks_meet_is_named_in_time(
    ranks: Any, when: str, who: int, fault: int, kinds: list[str]
) -> None:
    check_joiners(ranks("joiner", RANKS, 3, {"timeout_s": 3.0}, fault, when, who), who, kinds, within=15.0)


def test_a_process_group_of_torch_meets_through_our_store_and_is_used_and_left_alone(ranks: Any) -> None:
    children = ranks("over_torch", RANKS, 3)
    for rank, child in enumerate(children):
        assert child.result() == ([6, 6], [12 * rank, 12 * rank + 6], [3.0])


# -- in threads ------------------------------------------------------------------------------------


def listening() -> set[str]:
    """The addresses, in the kernel's hexadecimal, on which this process listens over TCP."""
    ours = {each.partition(" -> ")[2] for each in Resources.of().descriptors}
    tables = (Path(f"/proc/net/{kind}").read_text() for kind in ("tcp", "tcp6"))
    lines = [line.split() for table in tables for line in table.splitlines()]
    return {each[1].partition(":")[0] for each in lines if each[3] == "0A" and f"socket:[{each[9]}]" in ours}


@pytest.mark.skipif(not Path("/proc/net/tcp6").exists(), reason="Linux says in /proc where one listens")
def test_gloo_listens_at_the_configured_interface_and_nowhere_else(
    groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPLUG_SECRET", "the secret of all ranks")
    assert listening() == set()
    config = Config.from_dict({"communicator": "cpu", "host": "127.0.0.2"})
    made = at_all(groups(3), lambda group: build_communicator(config, group))
    try:
        assert listening() == {"0200007F"}
    finally:
        for each in made:
            each.destroy()


def test_a_host_may_be_the_name_of_an_interface() -> None:
    found = [address_of(host) for host in ("lo", "unix:", "10.1.2.3", "a.host", "::1")]
    assert found == ["127.0.0.1", "127.0.0.1", "10.1.2.3", "a.host", "::1"]


def test_where_strangers_could_reach_gloo_the_config_must_permit_it(groups: Any) -> None:
    config = Config.from_dict({"communicator": "cpu", "host": "0.0.0.0"})
    with pytest.raises(PluginError, match="allow_unauthenticated_data_plane"):
        build_communicator(config, groups(1)[0])


@pytest.mark.parametrize(
    ("world_size", "given", "kind", "words"),
    [
        (2, {"host": "203.0.113.1", "timeout_s": 5.0}, Exception, r"203\.0\.113\.1"),
        (2, {"device_group": "a word"}, ConfigError, "a torch process group with gloo is needed"),
        (1, {"device": "cuda:0"}, ConfigError, "takes CPU tensors, and the device is 'cuda:0'"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    groups: Any, world_size: int, given: dict[str, Any], kind: type[Exception], words: str
) -> None:
    def make(group: StatelessGroup) -> None:
        with pytest.raises(kind, match=words):
            cpu_ranks.make(group, **given)

    assert at_all(groups(world_size), make) == [None] * world_size


# -- the store -------------------------------------------------------------------------------------


def test_a_wait_at_the_store_ends_when_its_own_time_is_over_and_when_it_is_abandoned(groups: Any) -> None:
    store = GroupStore(groups(1)[0], "a/", Deadline.after(None))
    Call(lambda: store.wait(["none"], timedelta(seconds=0.3))).raised(TimeoutError)
    waiting = Call(lambda: store.get("key"))
    store.abandon()
    assert "abandoned" in str(waiting.raised(ClosedError))


def address(host: bytes, *, says: int | None = None, rest: int = 20) -> bytes:
    """What gloo sets, which is read with the length that it says."""
    return (len(host) if says is None else says).to_bytes(8, sys.byteorder) + host + bytes(rest)


@pytest.mark.parametrize(
    "lie",
    [
        b"",
        "text",
        None,
        address(b"there", says=1 << 40),
        address(b"there", rest=19),
    ],
    ids=repr,
)
def test_what_gloo_would_read_beyond_its_end_does_not_reach_it(groups: Any, lie: Any) -> None:
    group = groups(1)[0]
    store = GroupStore(group, "a/", Deadline.after(5.0))
    store.set("0/0", address(b"here"))
    for key, said in (("0/1", address(b"another host")), ("0/2", lie)):
        group.set(f"a/{key}", said)
    assert store.get("0/1") == address(b"another host")
    with pytest.raises(WireError, match="its address"):
        store.get("0/2")


def test_a_failure_of_gloo_leaves_no_thread_and_no_descriptor_whoever_holds_the_error() -> None:
    before, store = Resources.of().descriptors, torch.distributed.HashStore()

    def meet(rank: int) -> Gloo:
        return Gloo.meet(store, rank, 2, "127.0.0.1", Deadline.after(20.0), lambda: None)

    with ThreadPoolExecutor(2) as pool:
        here, there = pool.map(meet, range(2))
    there.close()
    with pytest.raises(TransportError) as raised:
        here.all_reduce(torch.ones(3), Deadline.after(20.0))
    here.close()
    until(lambda: not Resources.of().descriptors - before)
    assert raised.value
