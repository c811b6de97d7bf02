"""``kvplug doctor`` names each fault in a config, a host or a peer, and good runs raise no alarm."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import operator
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from click.testing import CliRunner

import kvplug
from kvplug import Config, Registry
from kvplug.assembly import examination, links as assembled, peers as assembled_peers
from kvplug.assembly.doctor.diagnosis import Diagnosis
from kvplug.assembly.doctor.doctor import diagnose, serve_doctors
from kvplug.assembly.doctor.explanation import explain
from kvplug.assembly.doctor.facts import engine_with, read_facts
from kvplug.assembly.links import ControlLink, LinkSettings
from kvplug.assembly.peers import CONTROL
from kvplug.assembly.resolve import ResolvedConfig, make_hello
from kvplug.assembly.stores import serve_store
from kvplug.cli.config import check as config_check
from kvplug.cli.doctor import doctor as command
from kvplug.cli.output import show_findings
from kvplug.errors import ConfigError, KvplugError, PeerGoneError
from kvplug.negotiation.agreement import agree
from kvplug.negotiation.exchange import hello_in
from kvplug.negotiation.hello import DOCTOR, Hello
from kvplug.net.trust.channel import Channel
from kvplug.net.trust.connection import Connection
from kvplug.net.trust.credentials import Credentials
from kvplug.net.wire import to_plain
from kvplug.transport import Acceptor
from kvplug_lab.faults import FaultyPipe, Rule
from kvplug_testing import waits
from kvplug_testing.engine import MODEL, FakeEngine
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.hosts import ADDRESSES, HostPair, NoHostsError
from kvplug_testing.pairs import accepting
from kvplug_testing.peers import Parent, Peer

SECRET, OTHER_SECRET = "s" * 32, "t" * 32
BASE: dict[str, Any] = {
    "role": "both",
    "timeout_s": 10,
    "buffer_size": 32 << 20,
    "options": {"host": {"segment_bytes": 1 << 20}},
}
FACTS = ["num_layers=3", "num_kv_heads=2", "head_size=8", "dtype=float32", "block_size=16"]
"""Those of the kit's fake engine."""
_NEW_MOUNTS, _NEW_IPC, _NEW_NET = 0x20000, 0x08000000, 0x40000000
_PRIVATE = 0x44000
# -- what children do --------------------------------------------------------------------------------


def _call(function: str, *args: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, function)(*args):
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


def _mount(folder: str, nbytes: int, *, full: bool = False) -> None:
    """A tmpfs of that size at the folder, which only this process sees."""
    _call("unshare", _NEW_MOUNTS)
    _call("mount", b"none", b"/", None, ctypes.c_ulong(_PRIVATE), None)
    size = f"size={nbytes}".encode()
    _call("mount", b"none", folder.encode(), b"tmpfs", ctypes.c_ulong(0), size)
    if full:
        room = os.statvfs(folder)
        with open(f"{folder}/filler", "wb") as file:
            file.write(bytes(room.f_bavail * room.f_frsize))


def prepare(given: Mapping[str, Any]) -> None:
    """Put the faults of a process into it."""
    os.environ.update(given.get("env", {}))
    for name, number in given.get("limits", {}).items():
        which = getattr(resource, f"RLIMIT_{name}")
        resource.setrlimit(which, (number, resource.getrlimit(which)[1]))
    if "unshare" in given:
        _call("unshare", given["unshare"])
    if "mount" in given:
        _mount(*given["mount"])
    if "full" in given:
        _mount(given["full"], 1 << 20, full=True)


def examine(parent: Parent, given: Mapping[str, Any]) -> Any:
    """Run a doctor in this process; its findings, or why the fault cannot be made here."""
    try:
        prepare(given)
    except OSError as e:
        return {"skip": str(e)}
    return _examined(given, Registry.from_env())


@functools.cache
def _registry() -> Registry:
    return Registry.from_env()


def _examined(given: Mapping[str, Any], registry: Registry) -> dict[str, Any]:
    config = Config.from_dict({**BASE, **given.get("config", {})})
    found = diagnose(
        config,
        registry,
        peer=given.get("peer"),
        facts=read_facts(given.get("facts", ())),
        write=given.get("write", False),
        timeout_s=given.get("timeout_s", 20),
    )
    return found.to_plain()


def _saying(changes: Mapping[str, Any]) -> None:
    """Have this process's engine say something else of itself than it is."""
    honest = assembled.make_hello

    def make_hello(*args: Any) -> Hello:
        hello = honest(*args)
        offers = hello.transports
        if "protocol" in changes:
            offers = tuple(attrs.evolve(each, protocol=changes["protocol"]) for each in offers)
        wire = tuple(changes.get("wire", hello.wire))
        versions = {**hello.versions, **changes.get("versions", {})}
        return attrs.evolve(hello, wire=wire, transports=offers, versions=versions)

    assembled.make_hello = make_hello  # type: ignore[assignment]


def run_engine(parent: Parent, given: Mapping[str, Any]) -> Any:
    """An engine of the connector "lookup", until the parent says that it ends."""
    try:
        prepare(given)
    except OSError as e:
        parent.send({"skip": str(e)})
        return None
    _saying(given.get("says", {}))
    if given.get("is_older"):
        assembled_peers.DOCTOR = "a word that it does not know"
    if "version" in given:
        kvplug.__version__ = given["version"]
    with _engine(given) as engine:
        parent.send({"contact": engine.worker.contact})
        failures, moved = 0, set[str]()
        while parent.recv(None) != "end":
            figures = engine.figures() or {}  # since the last call
            failures += sum(map(len, figures.get("failures", {}).values()))
            moved |= figures.get("ops", {}).keys() - {"handshake"}
            threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
            parent.send([threads, descriptors, failures, sorted(moved)])
    return None


def _engine(given: Mapping[str, Any]) -> FakeEngine:
    config = Config.from_dict({**BASE, **given.get("config", {})})
    model = MODEL if given.get("knows_weights", True) else attrs.evolve(MODEL, weights="")
    rules = [Rule.parsed(text) for text in given.get("rules", ())]
    return FakeEngine(
        config,
        listen=given.get("listen", "unix:"),
        model=model,
        wrap_pipe=functools.partial(FaultyPipe, rules=rules) if rules else None,
        **given.get("build", {}),
    )


# -- what tests do -----------------------------------------------------------------------------------


@contextlib.contextmanager
def an_engine(server: ForkServer, **given: Any) -> Iterator[tuple[str, Peer]]:
    """Its contact, and its process."""
    with server.start(f"{__file__}:run_engine", given, timeout_s=300) as child:
        said = child.recv()
        if "skip" in said:
            pytest.skip(f"this machine does not permit it: {said['skip']}")
        yield said["contact"], child
        if child.exit_code is None:
            child.send("end")


def doctor(server: ForkServer, **given: Any) -> list[dict[str, Any]]:
    """The findings of a doctor, in a process of its own where its fault is one of the process."""
    if not given.keys() & {"env", "limits", "unshare", "mount", "full"}:
        return list(_examined(given, _registry())["findings"])
    with server.start(f"{__file__}:examine", given, timeout_s=60) as child:
        found = child.result(60.0)
    if "skip" in found:
        pytest.skip(f"this machine does not permit it: {found['skip']}")
    return list(found["findings"])


@pytest.fixture(scope="module")
def good(fork_server: ForkServer) -> Iterator[str]:
    """The contact of an engine without a fault."""
    with an_engine(fork_server) as (contact, _):
        yield contact


def assert_named(findings: list[dict[str, Any]], finding: str) -> None:
    """One finding, ``VERDICT TOPIC: TEXT``, has the text in what is wrong, why, or which line to change."""
    verdict, _, rest = finding.partition(" ")
    topic, _, said = rest.partition(": ")
    named = [each for each in findings if each["topic"] == topic and each["verdict"] == verdict]
    texts = {" ".join((each["what"], *each["why"], f"-> {each['change']}")): each for each in named}
    shown = [each for each in findings if each["verdict"] != "ok"]
    assert len({(each["topic"], each["what"]) for each in shown}) == len(shown), "no fault is told twice"
    assert any(said in text for text in texts), json.dumps(shown, indent=1)
    assert all(each["change"] for text, each in texts.items() if said in text)
    assert SECRET not in json.dumps(findings)


SEEN_HERE: dict[str, tuple[dict[str, Any], str]] = {
    "small shared memory": ({"mount": ["/dev/shm", 1 << 20]}, "problem /dev/shm: 1 MiB are free"),
    "shared memory of a container": ({"mount": ["/dev/shm", 64 << 20]}, "note /dev/shm: it is small"),
    "few descriptors": ({"limits": {"NOFILE": 60}}, "problem descriptors: 60 may be open"),
    "short files": ({"limits": {"FSIZE": 1 << 20}}, "problem files: segments of shared memory: 1 MiB"),
    "a GPU that is not there": ({"config": {"device": "cuda:7"}}, "problem device: cuda:7: PyTorch"),
    "more buffers than memory": (
        {"config": {"buffer_size": 1 << 50}},
        "problem buffer_size: the kernel kills a process that takes more",
    ),
    "an address of another host": (
        {"config": {"host": "198.51.100.7"}, "env": {"KVPLUG_SECRET": SECRET}},
        "problem host: this host has no such address",
    ),
    "no secret for other hosts": ({"config": {"host": "0.0.0.0"}}, "problem secret: KVPLUG_SECRET"),
    "a secret that is too short": ({"env": {"KVPLUG_SECRET": "short"}}, "problem secret: at least 16"),
    "CPUs that are not there": ({"config": {"thread_cpus": "4000"}}, "problem thread_cpus: 4000"),
    "a blocked plugin": (
        {"config": {"transport": "shm"}, "env": {"KVPLUG_DISABLE_PLUGINS": "shm"}},
        "problem transport: take it out of KVPLUG_DISABLE_PLUGINS",
    ),
    "a misspelt option": (
        {"config": {"options": {"host": {"sizes": 5}}}},
        "problem options.host.sizes: did you mean 'size'",
    ),
    "no secret in the file": (
        {"config": {"secret_file": "/no/secret"}},
        "problem secret: -> secret_file = PATH",
    ),
    "a secret that is not used": (
        {"config": {"secret_file": "{secret}"}, "env": {"KVPLUG_SECRET": OTHER_SECRET}},
        "note secret: KVPLUG_SECRET is set but not used",
    ),
    "a secret for all users to read": (
        {"config": {"secret_file": "{secret}"}},
        "note secret_file: -> chmod 600",
    ),
    "an address to which no way leads": (
        {"peer": "198.51.100.7:29555", "unshare": _NEW_NET, "env": {"KVPLUG_SECRET": SECRET}},
        "problem peer: -> docker run --network=host",
    ),
    "a directory that does not answer": (
        {"config": {"peers": ["redis://127.0.0.1:1/0"]}},
        "problem peers: the directory 'redis' does not answer",
    ),
    "a peer's address at which nothing listens": (
        {"config": {"role": "consumer", "peers": ["127.0.0.1:1"]}, "env": {"KVPLUG_SECRET": SECRET}},
        "problem peer: no process listens at 127.0.0.1:1",
    ),
    "pages that do not divide blocks": (
        {
            "config": {"options": {"lookup": {"page_tokens": 17}}},
            "facts": ["block_size=16", "block_format=own"],
        },
        "problem options.lookup.page_tokens: a page has 17 tokens, and a block of the order 'own' has 16",
    ),
    "a store that is not installed": (
        {"config": {"stores": ["host", "hosts"]}},
        "problem stores: no store named 'hosts'",
    ),
    "a folder that is a file": (
        {"config": {"stores": ["fs"], "options": {"fs": {"path": __file__}}}},
        "problem stores: -> options.fs.path",
    ),
    "a folder of a read-only disk": (
        {"config": {"stores": ["fs"], "options": {"fs": {"path": "/proc/sys"}}}},
        "problem stores: cannot be written",
    ),
    "a Redis that is not there": (
        {"config": {"stores": ["redis"], "options": {"redis": {"address": ["127.0.0.1:1"]}}}},
        "problem stores: -> options.redis.address",
    ),
    "a device without a pipe": ({"config": {"transport": "pynccl"}}, "problem transport: cannot work here"),
    "a dead store": (
        {"config": {"options": {"host": {"contact": "unix:@kvplug-no-store"}}}},
        "problem stores: the store does not work",
    ),
}


@pytest.mark.parametrize("fault", SEEN_HERE)
def test_a_fault_of_this_host_is_named(fork_server: ForkServer, fault: str, tmp_path: Path) -> None:
    given, finding = SEEN_HERE[fault]
    if (config := given.get("config", {})).get("secret_file") == "{secret}":
        (tmp_path / "secret").write_text(SECRET)
        (tmp_path / "secret").chmod(0o644)
        given = {**given, "config": {**config, "secret_file": str(tmp_path / "secret")}}
    assert_named(doctor(fork_server, **given), finding)


@pytest.mark.parametrize(
    ("text", "environment", "change"),
    [
        ("[option.redis]\naddress = 1", {}, "options    (in place of option)"),
        ("role = 'bth'", {}, "role = 'both'"),
        ("rol = 'both'\nrole = 'both'", {}, "rol    (remove it: role is set already)"),
        ("role = both", {}, "kvplug.toml    (or another file: --config, KVPLUG_CONFIG)"),
        ("", {"KVPLUG_ROLE": "bth"}, "export KVPLUG_ROLE='both'"),
        ("password = 'x'", {}, "export KVPLUG_SECRET=...    (in place of password)"),
        ("", {"KVPLUG_PORT": "tcp://10.0.0.1:80"}, "enableServiceLinks: false    (in the pod)"),
    ],
)
def test_a_config_that_cannot_be_read_has_a_line_to_change(
    text: str, environment: dict[str, str], change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("kvplug.toml").write_text(text)
    done = CliRunner(env=environment).invoke(command, ["--json", "--config", "kvplug.toml"])
    finding, unchecked = json.loads(done.stdout)["findings"]
    assert (unchecked["verdict"], "were not checked" in unchecked["what"]) == ("note", True)
    assert (finding["topic"], finding["change"], done.exit_code) == ("config", change, 1)
    assert finding["why"] == ([] if environment else ["in kvplug.toml"])


def test_a_problem_of_the_config_leaves_out_only_the_checks_that_need_the_faulty_key(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    fs = {"fs": {"path": str(tmp_path / "pages")}}
    found = doctor(fork_server, config={"stores": ["fs"], "sinks": ["logs"], "options": fs})
    assert_named(found, "problem sinks: did you mean 'log'")
    checked = [(each["topic"], each["what"]) for each in found if each["verdict"] == "ok"]
    assert any("fs: it answers" in what for _, what in checked)
    assert {"host", "rate", "transport", "connector", "queue"} <= {topic for topic, _ in checked}
    found = doctor(
        fork_server,
        config={"stores": ["fs", "host"], "transport": "cpux", "options": {**fs, "host": {"sizes": 5}}},
    )
    assert_named(found, "problem options.host.sizes: did you mean 'size'")
    assert_named(found, "problem transport: no transport named 'cpux'")
    assert {"connector", "queue"} <= {each["topic"] for each in found if each["verdict"] == "ok"}
    assert any("fs: it answers" in each["what"] for each in found)
    texts = [each["what"] for each in found if each["verdict"] == "note"]
    assert "host: not tried, because of the problem of options.host.sizes" in texts
    assert "no pipe was tried here, because of the problem of transport" in texts
    found = doctor(fork_server, config={"peers": ["127.0.0.1:5000"], "role": "consumer"})
    assert_named(found, "problem secret: -> secret_file = PATH")
    texts = [each["what"] for each in found if each["verdict"] == "note"]
    assert "127.0.0.1:5000: not examined, because of the problem of secret" in texts


def test_a_fact_of_a_wrong_type_or_size_is_refused_in_plain_words() -> None:
    for given, said in (
        ("num_layers=many", "num_layers: 'many' was given; allowed is a whole number"),
        ("block_size=0", "block_size must be at least 1, but is 0"),
        ("layout=XYZ", "layout must consist of letters from KBTHD"),
    ):
        with pytest.raises(ConfigError) as caught:
            read_facts([given])
        assert said in caught.value.faults[0]


SEEN_AT_A_GOOD_PEER: dict[str, tuple[dict[str, Any], str]] = {
    "other model": ({"facts": ["num_layers=4"]}, "problem model.num_layers: ours 4, theirs 3"),
    "other block size": ({"facts": ["block_size=32"]}, "note block_size: it is converted"),
    "other hash": ({"config": {"integrity": "xxh3_128"}}, "problem integrity: to the same hash"),
    "another ipc namespace": ({"unshare": _NEW_IPC}, "note ipc namespace: each has its own ipc namespace"),
    "another network namespace": ({"unshare": _NEW_NET}, "problem peer: one network namespace"),
    "a blocked plugin here": (
        {"env": {"KVPLUG_DISABLE_PLUGINS": "shm,cpu,nixl,sample"}},
        "problem transport: take it out of KVPLUG_DISABLE_PLUGINS",
    ),
}


@pytest.mark.parametrize("fault", SEEN_AT_A_GOOD_PEER)
def test_a_fault_of_this_side_is_named_at_the_peer(fork_server: ForkServer, good: str, fault: str) -> None:
    given, finding = SEEN_AT_A_GOOD_PEER[fault]
    assert_named(doctor(fork_server, peer=good, **given), finding)


TCP = {"listen": "127.0.0.1:0"}
AS_BEFORE_S = 10.0


def _a_producer(weights: str, transport: str, page_tokens: int) -> dict[str, Any]:
    options = {"lookup": {"page_tokens": page_tokens}}
    return {"config": {"role": "producer", "weights": weights, "transport": transport, "options": options}}


SEEN_AT_A_BAD_PEER: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "a peer that does not know its weights": (
        {"knows_weights": False},
        {},
        ("problem weights: no other engine can load its KV",),
    ),
    "another wire": ({"says": {"wire": [9, 0]}}, {}, ("problem wire: theirs 9.0",)),
    "an engine that knows no doctors": ({"is_older": True}, {}, ("note peer: its kvplug may be older",)),
    "another protocol of every pipe": (
        {"says": {"protocol": 9}},
        {},
        ("problem transport: the same version at both ends",),
    ),
    "another secret": (
        {"env": {"KVPLUG_SECRET": OTHER_SECRET}, **TCP},
        {"env": {"KVPLUG_SECRET": SECRET}},
        ("problem secret: the secrets differ",),
    ),
    "a secret at one end": (
        {"env": {"KVPLUG_SECRET": OTHER_SECRET}, **TCP},
        {},
        ("problem secret: -> secret_file: what `kvplug config secret FILE` prints",),
    ),
    "one engine_id": (
        {"config": {"engine_id": "twin"}},
        {"config": {"engine_id": "twin"}},
        ("problem engine_id: twin",),
    ),
    "another config": (
        _a_producer("w at 1", "shm", 32),
        _a_producer("w at 2", "cpu", 64),
        (
            "problem model.weights: ours 'w at 2', theirs 'w at 1'",
            "problem role: both sides are producers",
            "problem transport: name the same one at both ends",
            "problem options.lookup.page_tokens: 64 here, 32 at the peer",
        ),
    ),
    "pages of another size than the default": (
        {"config": {"options": {"lookup": {"page_tokens": 32}}}},
        {},
        ("problem options.lookup.page_tokens: 16 here, 32 at the peer",),
    ),
    "what is noted and no alarm": (
        {
            "version": "9.9",
            "config": {"options": {"lookup": {"max_unsaved": "32 MiB"}}},
            "env": {"KVPLUG_DISABLE_PLUGINS": "shm"},
        },
        {},
        (
            "note versions: kvplug: 0.1.0 here, 9.9 at the peer",
            "note options.lookup.max_unsaved: its default here, 32 MiB at the peer",
            "note plugins: what they offer is missing",
        ),
    ),
    "little shared memory and few descriptors there": (
        {"mount": ["/dev/shm", 1 << 20], "limits": {"NOFILE": 70}},
        {},
        ("problem /dev/shm: 1 MiB are free", "problem descriptors: 70 may be open"),
    ),
    "an engine that says nothing of its host": (
        {"config": {"doctor": "off"}},
        {},
        ("note peer: doctor is 'off'",),
    ),
    "a slow pipe": (
        {"rules": ["slow bytes_per_s=2000000"]},
        {},
        ("problem rate: GB/s claimed",),
    ),
}


@pytest.mark.parametrize("fault", SEEN_AT_A_BAD_PEER)
def test_a_fault_of_the_peer_is_named(fork_server: ForkServer, fault: str) -> None:
    engine, ours, expected = SEEN_AT_A_BAD_PEER[fault]
    with an_engine(fork_server, **engine) as (contact, _):
        findings = doctor(fork_server, peer=contact, **ours)
    for finding in expected:
        assert_named(findings, finding)
    is_wrong = any(each["verdict"] == "problem" for each in findings)
    assert is_wrong == expected[0].startswith("problem"), "a note is no alarm"


def test_an_address_is_a_problem_if_another_program_holds_it_and_a_note_if_an_engine_does(
    fork_server: ForkServer,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        port = foreign.getsockname()[1]
        threading.Thread(target=_hang_up_once, args=(foreign,), daemon=True).start()
        held = {"host": "127.0.0.1", "port": port}
        found = doctor(fork_server, config=held, env={"KVPLUG_SECRET": SECRET})
    assert_named(found, "problem host: cannot start while another program listens there")
    host = f"unix:@kvplug-doctor-held-{os.getpid()}"
    with an_engine(fork_server, listen=f"{host}-0"):
        found = doctor(fork_server, config={"host": host})
    assert_named(found, "note host: this is fine if the engine of this config")
    assert not [each for each in found if each["verdict"] == "problem"]


def test_an_engine_in_peers_is_tried_without_being_measured(fork_server: ForkServer) -> None:
    host = f"unix:@kvplug-doctor-peers-{os.getpid()}"
    with an_engine(fork_server, listen=f"{host}-0", config={"options": {"lookup": {"page_tokens": 32}}}):
        given = {"role": "consumer", "peers": [f"{host}-0"]}
        wrong = doctor(fork_server, config=given)
        fine = doctor(fork_server, config={**given, "options": {"lookup": {"page_tokens": 32}}})
    assert_named(wrong, "problem options.lookup.page_tokens: 16 here, 32 at the peer")
    assert not [each for each in fine if each["verdict"] == "problem"]
    assert any(f"{host}-0 answers and agrees" in each["what"] for each in fine)


@pytest.mark.parametrize(
    ("days", "finding"),
    [
        (-1, "problem tls_cert: nothing is loaded"),
        (20, "note tls_cert: it expires in 19 days"),
        (90, "ok tls_cert: is valid from"),
    ],
)
def test_a_certificate_is_named_with_its_dates(
    tmp_path: Path, days: int, finding: str, fork_server: ForkServer
) -> None:
    trustme = pytest.importorskip("trustme", reason="makes certificates")
    authority = trustme.CA()
    ends = datetime.now(UTC) + timedelta(days=days)
    issued = authority.issue_cert("127.0.0.1", not_after=ends)
    files = {key: str(tmp_path / key) for key in ("tls_ca", "tls_key", "tls_cert")}
    authority.cert_pem.write_to_path(files["tls_ca"])
    issued.private_key_pem.write_to_path(files["tls_key"])
    issued.cert_chain_pems[0].write_to_path(files["tls_cert"])
    found = explain(Config.from_dict({**BASE, "host": "127.0.0.1", **files}), _registry())
    verdict, _, rest = finding.partition(" ")
    topic, _, said = rest.partition(": ")
    (named,) = (each for each in found if each.topic == topic)
    assert named.verdict == verdict and said in " ".join((named.what, *named.why))
    assert f"to {ends:%Y-%m-%d}" in named.what and files["tls_cert"] in named.what
    assert bool(named.change) == (verdict != "ok")
    (tmp_path / "kvplug.toml").write_text(
        "".join(f"{key} = '{path}'\n" for key, path in {**files, "host": "127.0.0.1", "role": "both"}.items())
    )
    checked = CliRunner().invoke(config_check, [str(tmp_path / "kvplug.toml")])
    assert checked.exit_code == (verdict == "problem")
    assert (f"to {ends:%Y-%m-%d}" in checked.stderr) == (verdict != "ok")


def test_a_fact_that_one_end_did_not_state_is_not_compared() -> None:
    config = Config.from_dict({**BASE, "host": f"unix:@kvplug-unknown-{os.getpid()}"})
    with serve_doctors(config, _registry(), facts={"num_layers": 32, "dtype": "float16"}) as served:
        other = attrs.evolve(config, engine_id="other")
        found = diagnose(other, _registry(), peer=served.contact, facts={"num_layers": 32})
    (model,) = (each.what for each in found.findings if each.topic == "model")
    compared, _, others = model.partition("; not compared: ")
    assert compared == "compared: num_layers"
    assert {"dtype", "head_size"} <= {*others.split(", ")}


def test_the_budget_of_a_store_is_compared_with_a_prompt(fork_server: ForkServer) -> None:
    facts = ["num_layers=32", "num_kv_heads=8", "head_size=128", "dtype=bfloat16"]
    for size, verdict in (("1 GiB", "note"), ("2 GiB", "ok")):
        config = {"role": "both", "stores": ["host"], "options": {"host": {"size": size}}}
        said = f"host: a prompt of 8,192 tokens takes 1 GiB of {size}"
        found = [each for each in doctor(fork_server, config=config, facts=facts) if said in each["what"]]
        assert [each["verdict"] for each in found] == [verdict]
        assert ("2048 MiB" in found[0]["change"]) == (verdict == "note")


def test_a_full_disk_is_named_with_and_without_a_page(fork_server: ForkServer, tmp_path: Path) -> None:
    config = {"stores": ["fs"], "options": {"fs": {"path": str(tmp_path)}}}
    assert_named(doctor(fork_server, config=config, full=str(tmp_path)), "problem stores: the disk is full")
    given = {"config": config, "write": True, "mount": [str(tmp_path), 65 << 20]}
    fine = [each for each in doctor(fork_server, **given) if each["topic"] == "stores"]
    assert any("put, got and removed" in each["what"] for each in fine), fine


def test_a_stopped_a_dead_and_a_foreign_peer_are_told_apart(fork_server: ForkServer) -> None:
    with an_engine(fork_server) as (contact, engine):
        os.kill(engine.pid, signal.SIGSTOP)
        try:
            stopped = doctor(fork_server, peer=contact, timeout_s=1)
        finally:
            os.kill(engine.pid, signal.SIGCONT)
        engine.kill()
        dead = doctor(fork_server, peer=contact)
    assert_named(
        stopped, "problem peer: did not answer in time -> kill -CONT PID at the peer if it is stopped"
    )
    assert_named(dead, "problem peer: no process listens at")
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        threading.Thread(target=_hang_up_once, args=(foreign,), daemon=True).start()
        given: Any = {"peer": f"127.0.0.1:{foreign.getsockname()[1]}", "env": {"KVPLUG_SECRET": SECRET}}
        found = doctor(fork_server, **given)
        assert_named(found, "problem peer: hung up before the proof was complete")
        threading.Thread(
            target=_hang_up_once, args=(foreign, b"-ERR unknown command\r\n" * 9), daemon=True
        ).start()
        found = doctor(fork_server, **given, timeout_s=5)
    assert_named(found, "problem peer: is not a kvplug listener")


def _hang_up_once(listener: socket.socket, after: bytes = b"") -> None:
    with contextlib.suppress(OSError), listener.accept()[0] as connected:
        connected.sendall(after)
        while after and connected.recv(4096):
            pass


def test_a_store_that_never_answers_is_named_by_the_deadline_and_the_program_ends(site: Any) -> None:
    site.add(
        "stuck",
        """
from kvplug.transport import StoreSpec, hookimpl
KVPLUG_API = (1, 0)
@hookimpl
def kvplug_stores():
    return [StoreSpec(name="stuck", factory="kvplug_stuck.store:make", summary="never there")]
""",
        files={"store.py": "import time\ndef make(context):\n    time.sleep(1000)"},
    )
    done = site.run(
        "-m", "kvplug.cli", "doctor", "--timeout", "1", "role=both", "stores=stuck", "--json", timeout_s=60
    )
    assert done.returncode == 1, done.stderr
    findings = json.loads(done.stdout)["findings"]
    assert_named(findings, "problem stores: stuck: the store does not work")
    assert_named(findings, "problem stores: did not answer within")


def test_a_store_that_another_program_serves_is_examined(good: str) -> None:
    config = Config.from_dict({**BASE, "options": {"host": {"size": 1 << 20, "segment_bytes": 1 << 18}}})
    with serve_store(config, "host", f"unix:@kvplug-doctor-store-{os.getpid()}") as served:
        contact = f"unix:{served.contact.removeprefix('unix:')}"
        found = diagnose(attrs.evolve(config, engine_id="other", sinks=("log",)), _registry(), peer=contact)
        used = {"host": {"contact": contact}}
        client = diagnose(Config.from_dict({**BASE, "options": used}), _registry(), write=True)
    assert not _problems(found)
    assert found.measured
    assert not client.problems
    assert any("put, got and removed" in each.what for each in client.findings)


def test_tls_at_one_end_is_named(tmp_path: Path, fork_server: ForkServer) -> None:
    trustme = pytest.importorskip("trustme", reason="makes certificates")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca")
    made = {
        name: {"host": "127.0.0.1", "tls_ca": str(tmp_path / "ca")} for name in ("127.0.0.1", "other.example")
    }
    for name, tls in made.items():
        issued = authority.issue_cert(name)
        for key, pem in (("tls_key", issued.private_key_pem), ("tls_cert", issued.cert_chain_pems[0])):
            tls[key] = str(tmp_path / f"{key} {name}")
            pem.write_to_path(tls[key])
    tls, wrong = made.values()
    env = {"KVPLUG_SECRET": SECRET}
    with an_engine(fork_server, config=tls, env=env, **TCP) as (contact, _):
        plain = doctor(fork_server, peer=contact, env=env)
        both = doctor(fork_server, peer=contact, env=env, config=tls)
    with an_engine(fork_server, config=wrong, env=env, **TCP) as (contact, _):
        named = doctor(fork_server, peer=contact, env=env, config=tls)
    mixed = doctor(fork_server, env=env, config={**tls, "tls_key": wrong["tls_key"]})
    assert_named(plain, "problem tls: it uses TLS and this end does not")
    assert not [each for each in both if each["verdict"] == "problem"]
    assert_named(named, "problem tls: -> tls_cert: one with 127.0.0.1 as subjectAltName")
    assert_named(mixed, "problem tls: tls_key is the key of tls_cert")


# -- good runs ---------------------------------------------------------------------------------------


def _counts(engine: Peer) -> Any:
    """Threads, descriptors and counted failures of an engine, and operations besides handshakes."""
    engine.send("count")
    return engine.recv()


def _problems(found: Diagnosis) -> list[str]:
    """Without a slow pipe on a host that other tests keep busy, which the finding says."""
    return [
        f"{each.topic}: {each.what}; {each.why}"
        for each in found.findings
        if each.verdict != "ok" and not (each.topic == "rate" and "this host is busy" in each.what)
    ]


def test_good_runs_raise_no_alarm_and_leave_the_engine_as_it_was(fork_server: ForkServer) -> None:
    config = Config.from_dict({**BASE, "sinks": ["log"]})
    facts = read_facts(FACTS)
    with an_engine(fork_server) as (contact, engine):
        before = _counts(engine)
        for number in range(4):
            peer = None if number == 2 else contact
            found = diagnose(config, _registry(), peer=peer, facts=facts)
            assert not _problems(found), number
            assert found.measured[0].gb_per_s > 0
        refused = diagnose(config, _registry(), peer=contact, facts={"num_layers": 5})
        assert refused.problems == 1
        # An engine that has just started may close something of its start after the first count.
        waits.until(
            lambda: all(map(operator.le, _counts(engine), before)), AS_BEFORE_S, what="the engine as it was"
        )


# -- a doctor, or a peer, that means harm ------------------------------------------------------------


@contextlib.contextmanager
def a_doctor_at(contact: str) -> Iterator[ControlLink]:
    """The link of a doctor after the handshake, which asks what the test wants."""
    resolved = ResolvedConfig(Config.from_dict(BASE), _registry())
    with contextlib.closing(Channel(Connection.dial(contact, Credentials(), CONTROL, 10))) as channel:
        received = channel.recv(10)
        remote = hello_in(received)
        engine = None if remote.engine is None else engine_with({}, "both", remote.engine)
        local = make_hello(resolved, engine, True, "cpu", DOCTOR)
        channel.send({"hello": to_plain(local)}, 10)
        channel.send(channel.recv(10), 10)  # its verdict
        agreement = agree(local, remote)
        yield ControlLink(LinkSettings(resolved=resolved), channel, agreement, accepted=False)


def _asked(link: ControlLink, **question: Any) -> Any:
    link.channel.send(question, 5)
    return link.channel.recv(5)


def test_what_a_doctor_takes_from_an_engine_is_bounded(fork_server: ForkServer) -> None:
    with an_engine(fork_server) as (contact, engine):
        before = _counts(engine)
        with a_doctor_at(contact) as link:
            for no_device in (["cpu"], {}, np.zeros(3), "tpu"):
                refused = _asked(link, doctor="measure", device=no_device)
                assert refused == {"measuring": False, "why": "the handshake did not agree on a pipe"}
            assert _asked(link, doctor="what a newer one asks") == {"unknown": True}
            assert _asked(link, doctor="measure", device="cpu")["measuring"]
            link.open_pipe("doctor", timeout=5).abort()
            link.channel.send({"send": 0}, 5)
            assert _asked(link, doctor="measure", device="cpu")["why"] == "it was measured already"
            with pytest.raises(PeerGoneError):
                for _ in range(20):
                    assert "report" in _asked(link, doctor="report")
        with contextlib.ExitStack() as held:
            links = [held.enter_context(a_doctor_at(contact)) for _ in range(8)]
            assert _asked(links[0], doctor="measure", device="cpu")["measuring"]
            held.callback(links[0].open_pipe("doctor", timeout=5).abort)  # in the middle, without a goodbye
            assert_named(doctor(fork_server, peer=contact), "note peer: already serves too many doctors")
        waits.until(lambda: _counts(engine) == before, AS_BEFORE_S, what="the engine as it was")
        assert not [each for each in doctor(fork_server, peer=contact) if each["topic"] == "peer"]


def test_a_doctor_that_is_silent_has_its_place_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "_MOST_S", 0.3)
    config = Config.from_dict({**BASE, "timeout_s": 3600, "host": f"unix:@kvplug-silent-{os.getpid()}"})
    with (
        serve_doctors(config, _registry()) as served,
        a_doctor_at(served.contact) as link,
        pytest.raises(PeerGoneError),
    ):
        link.channel.recv(20)


_ARRAY = np.zeros(3)
_BAD_ANSWERS: dict[str, tuple[Any, ...]] = {
    "no doctor": ({"report": {"doctor": _ARRAY}},),
    "no plugin": ({"report": {"doctor": "look", "host": {}, "missing": [_ARRAY]}},),
    "no contact": (
        {"report": {"doctor": "measure", "host": {}}},
        {"measuring": True},
        {"pipe": "doctor", "contact": "\x1b[31m"},
    ),
    "no agreement": (),
}


def _answers(listener: Acceptor[Connection], hello: Hello, answers: tuple[Any, ...]) -> None:
    with contextlib.closing(Channel(listener.accept(20))) as channel, contextlib.suppress(KvplugError):
        channel.send({"hello": to_plain(hello)}, 5)
        channel.recv(5)
        agreed = channel.recv(5)
        for answer in (
            (agreed, *answers) if answers else ({"agreed": {**agreed["agreed"], "checksum": _ARRAY}},)
        ):
            channel.send(answer, 5)
        while True:  # all is sent: who waits for more is hung up on
            channel.recv(0.5)


@pytest.mark.parametrize("case", _BAD_ANSWERS)
def test_whatever_a_peer_answers_is_a_finding(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = Config.from_dict({**BASE, "sinks": ["log"]})
    hello = make_hello(
        ResolvedConfig(attrs.evolve(config, engine_id="x"), _registry()), None, True, "cpu", ""
    )
    with accepting("unix:", Credentials(), CONTROL) as listener:
        answers = (listener, hello, _BAD_ANSWERS[case])
        peer = threading.Thread(target=_answers, args=answers, daemon=True)
        peer.start()
        found = diagnose(config, _registry(), peer=listener.contact, timeout_s=10)
        peer.join(10)
    assert _problems(found), "it is not a good run"
    show_findings(found.findings, details=True)
    assert capsys.readouterr().out.replace("\n", "").isprintable()


def engine_on_a_host(parent: Parent, address: str, secret: str) -> None:
    os.environ["KVPLUG_SECRET"] = secret
    config = Config.from_dict({**BASE, "host": address})
    with FakeEngine(config, listen=f"{address}:0") as engine:
        parent.send(engine.worker.contact)
        parent.recv(None)


@pytest.mark.full
def test_a_good_run_between_two_hosts_raises_no_alarm(fork_server: ForkServer) -> None:
    try:
        hosts = HostPair(fork_server)
    except NoHostsError as e:
        pytest.skip(f"there can be no two hosts here: {e}")
    target = f"{__file__}:engine_on_a_host"
    with hosts, hosts.start(1, target, ADDRESSES[1], SECRET, timeout_s=60) as engine:
        given = {
            "config": {"host": ADDRESSES[0], "sinks": ["log"]},
            "env": {"KVPLUG_SECRET": SECRET},
            "peer": engine.recv(),
            "facts": FACTS,
        }
        with hosts.start(0, f"{__file__}:examine", given, timeout_s=60) as child:
            found = child.result(60.0)
        engine.send("end")
    wrong = [each for each in found["findings"] if each["verdict"] == "problem"]
    assert not wrong
    said = {each["topic"]: each["what"] for each in found["findings"]}
    assert said["transport"].startswith("cpu tensors go by cpu")
    assert said["hosts"].startswith("the peer is on another host: kvplug-host1")
    assert found["measured"][0]["gb_per_s"] > 0


def test_a_doctor_that_serves_ends_by_a_signal_and_is_done() -> None:
    program = [sys.executable, "-m", "kvplug.cli", "doctor", "--serve", "--fact", "num_layers=32"]
    more = ["role=both", "doctor=look", f"host=unix:@kvplug-doctor-serves-{os.getpid()}"]
    with subprocess.Popen([*program, *more], stdout=subprocess.PIPE, text=True) as serves:
        assert serves.stdout is not None
        try:
            contact = serves.stdout.readline().strip()
            config = Config.from_dict({**BASE, "sinks": ["log"]})
            found = diagnose(config, _registry(), peer=contact, facts={"num_layers": 40})
        finally:
            serves.send_signal(signal.SIGTERM)
        assert serves.wait(30) == 0
    assert_named(
        [attrs.asdict(each) for each in found.findings], "problem model.num_layers: ours 40, theirs 32"
    )
    assert not found.measured
    assert found.peer_host is not None


def test_the_program_fits_a_terminal_and_says_by_its_code_what_it_found(good: str, tmp_path: Path) -> None:
    run = functools.partial(CliRunner().invoke, command)
    fine = run(["--peer", good, "role=both", "sinks=log", *(f"--fact={fact}" for fact in FACTS)])
    assert (fine.exit_code, fine.stderr) == (0, ""), fine.output
    assert max(map(len, fine.stdout.splitlines())) <= 80
    assert "no problems found" in fine.stdout
    bad = run(["--json", "--fact", "num_layers=4", "--peer", good, "role=both"])
    assert bad.exit_code == 1
    assert json.loads(bad.stdout).keys() == {"problems", "findings", "measured", "host", "peer_host"}
    assert run(["role=bath"]).exit_code == 1
    Path(tmp_path / "kvplug.toml").write_text('role = "both"')
    quiet = run([str(tmp_path / "kvplug.toml"), "--quiet"])
    assert (quiet.exit_code, "others are ok" in quiet.stdout) == (0, True), quiet.output
    assert not [line for line in quiet.stdout.splitlines() if line.startswith("ok ")]
    for wrong in (
        ["--fact", "layers=4"],
        ["--serve", "--peer", good],
        ["--timeout", "0"],
        ["--nothing"],
        ["a.toml", "b.toml"],
    ):
        assert run(wrong).exit_code == 2, wrong
