"""Ranks of the communicator "cpu" that die or stop in the middle, process groups of torch, and addresses."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from kvplug import (
    ClosedError,
    Config,
    ConfigError,
    PluginError,
    StatelessGroup,
    TimeoutError,
    TransportError,
    UnsupportedError,
    build_communicator,
)
from kvplug.transport import Credentials, Deadline, WireError
from kvplug_cpu.communicator import CpuCommunicator
from kvplug_cpu.gloo import Gloo
from kvplug_cpu.interface import address_of
from kvplug_cpu.store import GroupStore
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.peers import Peer

RANKS = Path(__file__).with_name("ranks.py")
Start = Callable[..., list[Peer]]


@pytest.fixture
def ranks(fork_server: ForkServer) -> Iterator[Start]:
    """Starts a function of ranks.py at each rank, and carries the first rank's contact to the others."""
    with ExitStack() as stack:

        def start(what: str, world_size: int, *args: Any) -> list[Peer]:
            children = [
                stack.enter_context(
                    fork_server.start(f"{RANKS}:{what}", rank, world_size, *args, timeout_s=90)
                )
                for rank in range(world_size)
            ]
            carry(children)
            return children

        yield start


def carry(children: list[Peer]) -> None:
    contact = children[0].recv()
    for child in children[1:]:
        child.send(contact)


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "kind"),
    [(signal.SIGSTOP, "TimeoutError"), (signal.SIGKILL, "PeerGoneError")],
    ids=["stop", "kill"],
)
@pytest.mark.parametrize("method", ["all_reduce", "all_gather", "reduce_scatter"])
def test_a_rank_that_is_struck_in_the_middle_is_named_and_the_others_go_on_without_it(
    ranks: Start, method: str, fault: int, kind: str
) -> None:
    children = ranks("survivor", 4, method, 2.0, int(fault))
    for child in children:
        assert child.recv() == "ready"
    for child in children:
        child.send("go")
    for child in children[:-1]:
        name, text = child.recv()
        assert name == kind, text
        assert "rank 3" in text
    carry(children[:-1])
    for child in children[:-1]:
        assert child.result() == [6, 6, 6]
    children[-1].kill()


def test_a_batch_is_left_in_time_too(ranks: Start) -> None:
    children = ranks("survivor", 3, "batch_isend_irecv", 2.0, int(signal.SIGSTOP))
    for child in children:
        assert child.recv() == "ready"
    for child in children:
        child.send("go")
    found = [child.recv() for child in children[:-1]]
    assert {name for name, _ in found} == {"TimeoutError"}, found
    carry(children[:-1])
    for child in children[:-1]:
        assert child.result() == [3, 3, 3]
    children[-1].kill()


def test_without_a_deadline_a_death_in_the_middle_is_heard(ranks: Start) -> None:
    children = ranks("survivor", 3, "all_reduce", None, int(signal.SIGSTOP))
    for child in children:
        assert child.recv() == "ready"
    for child in children:
        child.send("go")
    children[-1].kill()
    for child in children[:-1]:
        name, text = child.recv()
        assert name == "PeerGoneError", text
        assert "rank 2" in text
    carry(children[:-1])
    for child in children[:-1]:
        assert child.result() == [3, 3, 3]


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "kind"),
    [(signal.SIGSTOP, "TimeoutError"), (signal.SIGKILL, "PeerGoneError")],
    ids=["stop", "kill"],
)
def test_a_rank_that_is_struck_while_the_ranks_meet(ranks: Start, fault: int, kind: str) -> None:
    children = ranks("joiner", 3, 3.0 if fault == signal.SIGSTOP else 60.0, int(fault), "gloo", 2)
    assert children[-1].recv() == "struck"
    for child in children[:-1]:
        name, text = child.recv()
        assert name == kind, text
        assert "rank 2" in text
    children[-1].kill()


@pytest.mark.full
@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL], ids=["stop", "kill"])
def test_a_rank_that_is_struck_while_the_ranks_make_their_pipes_is_named(ranks: Start, fault: int) -> None:
    children = ranks("joiner", 3, 3.0, int(fault), "pipes", 2)
    assert children[-1].recv() == "struck"
    for child in children[:-1]:
        name, text = child.recv()
        assert name in ("TimeoutError", "PeerGoneError"), text
        assert "rank 2" in text
    children[-1].kill()


@pytest.mark.full
@pytest.mark.timing
@pytest.mark.parametrize("when", ["gloo", "ready"])
def test_the_rank_that_keeps_the_groups_store_is_not_waited_for_longer(ranks: Start, when: str) -> None:
    children = ranks("joiner", 3, 3.0, int(signal.SIGSTOP), when, 0)
    assert children[0].recv() == "struck"
    for child in children[1:]:
        name, text = child.recv(timeout=15.0)  # the group itself would wait for 30 s
        assert name == "TimeoutError", text
    children[0].kill()


def test_a_process_group_of_torch_meets_through_our_store_and_is_used_and_left_alone(
    ranks: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = ranks("over_torch", 3)
    for rank, child in enumerate(children):
        assert child.result() == ([6, 6], [12 * rank, 12 * rank + 6], [3.0])


# -- processes that end ----------------------------------------------------------------------------

ALONE = """
from kvplug import StatelessGroup, TimeoutError
from kvplug.transport import Deadline
from kvplug_cpu.gloo import Gloo
from kvplug_cpu.store import GroupStore

group = StatelessGroup.create("unix:", rank=0, world_size=1)
store = GroupStore(group, "a/", Deadline.after(60.0))
try:
    Gloo.meet(store, 0, 2, "127.0.0.1", Deadline.after(0.5), lambda: None)
except TimeoutError:
    store.abandon()
    print("in time", flush=True)
"""
UNDER_WAY = """
import threading, time, torch
from kvplug.transport import Deadline
from kvplug_cpu.gloo import Gloo

store = torch.distributed.HashStore()
ends = [None, None]

def meet(rank):
    ends[rank] = Gloo.meet(store, rank, 2, "127.0.0.1", Deadline.after(60.0), lambda: None)

meeting = [threading.Thread(target=meet, args=(rank,)) for rank in range(2)]
[each.start() for each in meeting]
[each.join() for each in meeting]
threading.excepthook = lambda _: None
call = lambda: ends[0].all_reduce(torch.ones(3), Deadline.after(None))
threading.Thread(target=call, daemon=True).start()
time.sleep(0.3)
print("in time", flush=True)
"""


@pytest.mark.full
@pytest.mark.parametrize("program", [ALONE, UNDER_WAY], ids=["meeting", "operation"])
def test_a_process_whose_thread_is_in_gloo_ends_as_any_other(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "in time\n"), done.stderr


# -- in threads ------------------------------------------------------------------------------------


def at_all(groups: list[StatelessGroup], do: Callable[[StatelessGroup], Any]) -> list[Any]:
    """``do(group)`` in a thread for each group. Each thread's failure is shown: one may explain another's."""
    with ThreadPoolExecutor(len(groups)) as pool:
        calls = [pool.submit(do, group) for group in groups]
    failures = [error for call in calls if isinstance(error := call.exception(), Exception)]
    if len(failures) > 1:
        raise ExceptionGroup("more than one rank failed", failures)
    return [call.result() for call in calls]


def listening() -> set[str]:
    """The addresses on which this process listens over TCP."""
    ours = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            ours.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    found = set()
    for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in ours:
            number = bytes.fromhex(fields[1].partition(":")[0])
            found.add(socket.inet_ntoa(number[::-1]))
    tcp6 = Path("/proc/net/tcp6")
    if tcp6.exists():
        for line in tcp6.read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in ours:
                found.add(fields[1])
    return found


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="Linux says in /proc where one listens")
@pytest.mark.parametrize(
    ("host", "address"), [("127.0.0.2", "127.0.0.2"), ("lo", "127.0.0.1"), ("unix:@kv", "127.0.0.1")]
)
def test_gloo_listens_at_the_configured_interface_and_nowhere_else(
    groups: Any, host: str, address: str
) -> None:
    assert listening() == set()

    def make(group: StatelessGroup) -> Any:
        if host == "lo":
            return CpuCommunicator(context(group, host=host))
        return build_communicator(Config.from_dict({"communicator": "cpu", "host": host}), group)

    made = at_all(groups(3), make)
    try:
        assert listening() <= {address}
        assert listening()
    finally:
        for each in made:
            each.destroy()


def context(group: StatelessGroup, **given: Any) -> Any:
    from kvplug.transport import CommunicatorContext

    return CommunicatorContext(
        **{"options": None, "credentials": Credentials(), "group": group, "timeout_s": 30.0, **given}
    )


def test_a_host_may_be_the_name_of_an_interface() -> None:
    assert address_of("lo") == "127.0.0.1"
    assert [address_of(host) for host in ("10.1.2.3", "a.host", "::1")] == ["10.1.2.3", "a.host", "::1"]
    assert address_of("unix:") == "127.0.0.1"


def test_an_address_that_gloo_cannot_bind_is_an_error_and_leaves_nothing(groups: Any) -> None:
    def make(group: StatelessGroup) -> str:
        with pytest.raises(Exception, match=r"203\.0\.113\.1") as caught:
            CpuCommunicator(context(group, host="203.0.113.1", timeout_s=5.0))
        return type(caught.value).__name__

    at_all(groups(2), make)


def test_where_strangers_could_reach_gloo_the_config_must_permit_it(groups: Any) -> None:
    config = Config.from_dict({"communicator": "cpu", "host": "0.0.0.0"})
    with pytest.raises(PluginError, match="allow_unauthenticated_data_plane"):
        build_communicator(config, groups(1)[0])


def test_another_device_and_a_group_of_other_ranks_are_refused(groups: Any) -> None:
    with pytest.raises(ConfigError, match="takes CPU tensors, and the device is 'cuda:0'"):
        CpuCommunicator(context(groups(1)[0], device="cuda:0"))

    class Other:
        def rank(self) -> int:
            return 5

        def size(self) -> int:
            return 7

        def _get_backend(self, device: torch.device) -> None:
            pass

    def make(group: StatelessGroup) -> None:
        with pytest.raises(ConfigError, match="rank 5 of 7"):
            CpuCommunicator(context(group, device_group=Other()))

    at_all(groups(2), make)

    def make_without(group: StatelessGroup) -> None:
        with pytest.raises(ConfigError, match="a torch process group with gloo is needed"):
            CpuCommunicator(context(group, device_group="a word"))

    at_all(groups(2), make_without)


def test_an_operation_that_cannot_be_ended_is_not_waited_for_by_destroy(
    groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvplug_cpu import gloo

    monkeypatch.setattr(gloo, "_ENDING_S", 0.1)
    monkeypatch.setattr(gloo, "_BEYOND_S", 3.0)
    monkeypatch.setattr(torch.distributed.ProcessGroupGloo, "recv", lambda *_: _Nothing())
    both = groups(2)
    made = at_all(both, lambda group: CpuCommunicator(context(group)))
    made[1]._all_reduce = lambda *_: time.sleep(1.5)
    calls = [
        lambda: made[0].all_reduce(torch.ones(3), timeout=0.5),
        lambda: made[1].all_reduce(torch.ones(3)),
    ]
    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(call) for call in calls)
        with pytest.raises(TimeoutError, match="rank 1 began a collective, did not go on"):
            first.result(30)
        made[0].destroy()
        assert "kvplug-cpu-gloo" in {thread.name for thread in threading.enumerate()}  # that one waits
        second.result(30)
    made[1].destroy()


class _Nothing:
    def wait(self, timeout: Any) -> None:
        pass


def test_a_way_of_exchange_that_is_not_known_is_refused_with_those_that_are(groups: Any) -> None:
    given = {"unique_name": "ep:0", "data_parallel_size": 2, "all2all_backend": "pigeons"}
    with pytest.raises(ConfigError, match=r"'pigeons' is none .*: allgather_reducescatter, naive"):
        CpuCommunicator(context(groups(1)[0], **given))


def test_one_rank_alone_opens_nothing(groups: Any) -> None:
    group = groups(1)[0]
    before = set(os.listdir("/proc/self/fd"))
    with CpuCommunicator(context(group)) as made:
        assert set(os.listdir("/proc/self/fd")) == before
        given = torch.arange(3)
        assert made.all_gather(given) is given
    with pytest.raises(ClosedError):
        made.all_gather(given)


# -- the store -------------------------------------------------------------------------------------


def test_the_store_keeps_what_torch_expects_of_one(groups: Any) -> None:
    group = groups(1)[0]
    store = GroupStore(group, "a/", Deadline.after(0.3))
    store.set("key", b"\x00\xff")
    store.set("word", "text")
    assert (store.get("key"), store.get("word")) == (b"\x00\xff", b"text")
    assert store.check(["key", "word"])
    assert not store.check(["key", "none"])
    assert [store.add("count", 2), store.add("count", 3)] == [2, 5]
    store.wait(["key", "count"])
    with pytest.raises(TimeoutError, match="none"):
        store.wait(["none"])
    with pytest.raises(UnsupportedError):
        store.num_keys()
    assert store.delete_key("word")
    assert not store.delete_key("word")
    store.forget()
    assert not store.check(["key"])
    assert not store.check(["count"])


def address(host: bytes, *, says: int | None = None, rest: int = 20) -> bytes:
    """What gloo sets, which is read with the length that it says."""
    return (len(host) if says is None else says).to_bytes(8, sys.byteorder) + host + bytes(rest)


@pytest.mark.parametrize(
    "lie",
    [
        b"",
        b"short",
        7,
        "text",
        None,
        address(b"there", says=1 << 40),
        address(b"there", says=6),
        address(b"there", rest=19),
        address(b"", rest=21),
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


def descriptors() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that listed them
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    return found


def check_gone(before: set[str]) -> None:
    until = time.monotonic() + 20
    while (left := descriptors() - before) and time.monotonic() < until:
        time.sleep(0.02)
    assert not left


def test_a_failed_meeting_leaves_no_thread_and_no_descriptor(groups: Any) -> None:
    """Whatever holds the error: gloo's device has both."""
    store = GroupStore(groups(1)[0], "a/", Deadline.after(1.0))
    before = descriptors()

    def fail() -> None:
        raise WireError("the test wants it so")

    with pytest.raises(WireError) as raised:
        Gloo.meet(store, 0, 2, "127.0.0.1", Deadline.after(20.0), fail)
    store.abandon()
    check_gone(before)
    assert raised.value


def test_a_failed_operation_leaves_no_thread_and_no_descriptor() -> None:
    store = torch.distributed.HashStore()

    def meet(rank: int) -> Gloo:
        return Gloo.meet(store, rank, 2, "127.0.0.1", Deadline.after(20.0), lambda: None)

    before = descriptors()
    with ThreadPoolExecutor(2) as pool:
        here, there = pool.map(meet, range(2))
    there.close()
    with pytest.raises(TransportError) as raised:
        here.all_reduce(torch.ones(3), Deadline.after(20.0))
    here.close()
    check_gone(before)
    assert raised.value


def test_a_wait_at_the_store_ends_when_its_own_time_is_over(groups: Any) -> None:
    store = GroupStore(groups(1)[0], "a/", Deadline.after(None))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.wait, ["none"], timedelta(seconds=0.3))
        with pytest.raises(TimeoutError, match="none"):
            waiting.result(30)


def test_whoever_waits_at_the_store_hears_that_it_is_abandoned(groups: Any) -> None:
    store = GroupStore(groups(1)[0], "a/", Deadline.after(None))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "key")
        store.abandon()
        with pytest.raises(ClosedError, match="abandoned"):
            waiting.result(30)


def test_nothing_of_the_meeting_stays_in_the_groups_store(
    groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, set_key = [], StatelessGroup.set

    def note(group: StatelessGroup, key: str, value: object) -> None:
        kept.append(key)
        set_key(group, key, value)

    monkeypatch.setattr(StatelessGroup, "set", note)
    both = groups(2)
    made = at_all(both, lambda group: CpuCommunicator(context(group)))
    at_all(both, lambda group: group.barrier())
    assert len(kept) >= 2
    for key in kept:
        with pytest.raises(TimeoutError):
            both[0].get(key, 0)
    for each in made:
        each.destroy()
