"""The store "redis" with real servers: what the kit does not know of."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import valkey
from server_process import certificates, free_port

import redis_pages
from kvplug import ConfigError
from kvplug.transport import MissReason, PutReason, Store
from kvplug_redis.replies import ReplyConnection
from kvplug_redis.values import HEAD_BYTES, Head, Names
from kvplug_testing import check_plugin, peers, waits
from redis_pages import PAGES, PIECE, before_piece, dying_writer, got, put, request
from redis_server import RedisServer

README = Path(__file__).parents[1] / "README.md"
READ_ONLY = "-@all +client|setname +strlen +get +hlen +select"
NOWHERE = "127.0.0.1:1"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.kill()


@pytest.fixture
def raw(server: RedisServer) -> Iterator[Any]:
    """Another client of the server."""
    with valkey.Valkey(port=server.port) as client:
        yield client


@pytest.fixture
def opened() -> Iterator[Callable[..., Store]]:
    """Makes stores, which are closed after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *where, **options: stack.enter_context(redis_pages.opened(*where, **options))


def names_of(raw: Any, kind: str = "*") -> list[bytes]:
    """Those of all values: manifests ("m") or pieces ("p")."""
    return list(raw.scan_iter(match=f"kvplug:2:{kind}" if kind == "*" else f"kvplug:2:{kind}:*"))


@pytest.mark.full
def test_it_keeps_the_laws_of_plugins() -> None:
    assert check_plugin("redis") == ()


def test_a_large_page_lies_in_pieces_and_a_lost_piece_is_a_miss(
    server: RedisServer, opened: Any, raw: Any
) -> None:
    store = opened(server.address, size=10 << 20)
    assert put(store, "a", "b") == [None, None]
    sizes = sorted(raw.strlen(name) for name in names_of(raw))
    assert sizes[:2] == [HEAD_BYTES] * 2 and sizes[-1] == PIECE
    assert got(store, "a", "b") == [None, None]
    assert all(raw.ttl(name) == -1 for name in names_of(raw)), "a page expires"
    raw.delete(next(raw.scan_iter(match="kvplug:2:p:*:5")))  # as the server's own eviction does
    assert sorted(map(str, got(store, "a", "b"))) == ["None", "absent"]
    assert len(names_of(raw, "m")) == 1
    assert len(names_of(raw, "p")) == 11, "pieces of a page that is lost are left"
    store.submit_lookup([]).wait(5)
    assert store.usage().num_pages == 1


@pytest.mark.parametrize("options", [{}, {"size": 1 << 30, "touch_s": 0}], ids=["no budget", "a budget"])
def test_all_pages_of_a_call_take_two_round_trips(
    server: RedisServer, opened: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    store, names = opened(server.address, connections=1, **options), [str(number) for number in range(8)]
    assert got(store, "absent") == [MissReason.ABSENT], "which connects"
    sent: list[int] = []
    send = ReplyConnection.send_packed_command

    def counted(connection: Any, buffers: Any, **given: Any) -> None:
        sent.append(len(buffers))
        send(connection, buffers, **given)

    monkeypatch.setattr(ReplyConnection, "send_packed_command", counted)
    for nbytes in (1000, PAGES.nbytes):
        given = [f"{nbytes} {name}" for name in names]
        sent.clear()
        assert not any(put(store, *given, nbytes=nbytes))
        assert len(sent) == 2, "a put"
        sent.clear()
        assert not any(got(store, *given, nbytes=nbytes))
        assert len(sent) <= 2, "a get"


@pytest.mark.parametrize("fill", [b"theirs", b"mine"])
def test_the_first_of_two_writers_wins_and_leaves_nothing_of_the_other(
    server: RedisServer, opened: Any, raw: Any, monkeypatch: pytest.MonkeyPatch, fill: bytes
) -> None:
    one, other = (opened(server.address, size=10 << 20) for _ in range(2))
    act = before_piece(5, lambda: put(one, "a", fill=b"mine"))
    monkeypatch.setattr(ReplyConnection, "send_packed_command", act)
    assert put(other, "a", fill=fill) == [None]
    assert got(other, "a", fill=b"mine") == [None]
    assert len(names_of(raw, "p")) == 11 and len(names_of(raw, "m")) == 1
    assert all(raw.ttl(name) == -1 for name in names_of(raw)), "the page expires"
    other.submit_lookup([]).wait(5)
    assert other.usage().num_pages == 1


@pytest.mark.parametrize("written", [0, 5])
def test_a_page_that_another_client_evicts_while_it_is_written_is_written_again(
    server: RedisServer, opened: Any, raw: Any, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    one, other = (opened(server.address, size=100_000) for _ in range(2))
    act = before_piece(written, lambda: put(one, "b"))
    monkeypatch.setattr(ReplyConnection, "send_packed_command", act)
    assert put(other, "a") == [None]
    assert got(other, "a") == [None]
    assert len(names_of(raw, "m")) == raw.hlen(Names("kvplug").budget[1]), "a page is not counted"
    assert put(one, "c") == [None]
    assert got(other, "a", "b", "c") == [MissReason.ABSENT, MissReason.ABSENT, None]
    assert len(names_of(raw, "p")) == 11 and len(names_of(raw, "m")) == 1


def test_what_a_writer_that_dies_leaves_is_no_page_and_is_counted_and_goes(
    server: RedisServer, opened: Any, raw: Any
) -> None:
    with peers.start(dying_writer, server.address) as peer:
        assert peer.recv() == "half"
        peer.kill()
    waits.until(lambda: len(names_of(raw)) == 5, 5, "the pieces that were sent")
    left = names_of(raw)
    assert all(0 < raw.ttl(name) <= 600 for name in left), "orphans do not expire"
    store = opened(server.address, size=100_000)
    assert got(store, "a") == [MissReason.ABSENT]
    assert store.submit_lookup(request(store, "a").keys).wait(5)
    assert store.usage().num_pages == 1, "what is left is not counted"
    assert put(store, "b") == [None]
    assert not set(left) & set(names_of(raw)), "orphans make no room"
    assert got(store, "b") == [None]


def test_the_server_uses_no_more_memory_than_the_budget(server: RedisServer, opened: Any, raw: Any) -> None:
    for nbytes, piece in ((1000, PIECE), (70_000, PIECE), (300_000, 1 << 20), (2_500_000, 1 << 20)):
        raw.flushall()
        before, budget = raw.info("memory")["used_memory"], max(3 << 20, min(12 << 20, 1000 * nbytes))
        store = opened(server.address, size=budget, piece_bytes=piece)
        names = [f"{nbytes}-{number}" for number in range(min(3000, 2 * budget // nbytes))]
        assert not any(put(store, *names, nbytes=nbytes))
        assert got(store, names[-1], nbytes=nbytes) == [None]
        stated = store.usage()
        assert budget / 2 < stated.used_bytes <= budget
        assert stated.num_evicted > 0
        store.close()  # its connections have buffers in the server
        _until_used(raw, before + stated.used_bytes + (256 << 10), f"the budget for pages of {nbytes} bytes")


def _until_used(raw: Any, most: int, what: str) -> None:
    waits.until(lambda: raw.info("memory")["used_memory"] <= most, 5, what)


def test_pages_that_are_not_used_expire_and_are_not_counted_then(
    server: RedisServer, opened: Any, raw: Any
) -> None:
    store = opened(server.address, size=10 << 20, ttl_s=2, touch_s=0)
    assert put(store, "a", "b") == [None, None]
    until = time.monotonic() + 3.5
    while time.monotonic() < until:
        assert got(store, "a") == [None], "a page that is used has expired"
        time.sleep(0.3)
    assert got(store, "a", "b") == [None, MissReason.ABSENT]
    assert put(store, "c") == [None]
    assert store.usage().num_pages == 2


def test_a_server_that_is_full_before_its_budget_is_used_says_so_and_gives_what_it_has(
    server: RedisServer, opened: Any, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(server.address, size=1 << 30, touch_s=0)
    assert put(store, "a", "b") == [None, None]
    raw.config_set("maxmemory", raw.info("memory")["used_memory"] // 2)
    for number in range(3):
        assert put(store, f"more {number}") == [PutReason.NO_ROOM]
        assert got(store, "a", "b") == [None, None], "a use cannot be noted there, and the page is there"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "the server is full: raise maxmemory, or lower options.redis.size" in warnings[0]
    assert list(store.submit_remove(request(store, "a").keys).wait(10)) == [True]
    store.submit_lookup([request(store, "b").keys[0]]).wait(5)
    assert store.usage().num_pages == 1
    raw.config_set("maxmemory", 0)
    assert put(store, "more 0") == [None]


def test_a_key_of_another_type_is_a_page_that_is_missed_alone_and_replaced(
    server: RedisServer, opened: Any, raw: Any
) -> None:
    store = opened(server.address, size=10 << 20)
    names = [f"page {number}" for number in range(20)]
    assert not any(put(store, *names))
    keys = request(store, *names).keys
    manifests = [Names("kvplug").manifest(key) for key in keys]
    for at, value in ((3, "list"), (4, "short text")):
        raw.delete(manifests[at])
        raw.rpush(manifests[at], "x") if value == "list" else raw.set(manifests[at], "x")
    piece = next(raw.scan_iter(match=b"kvplug:2:p:{" + keys[5].hex().encode() + b"*:5"))
    raw.delete(piece)
    raw.rpush(piece, "x")
    for _ in range(2):
        held = list(store.submit_lookup(keys).wait(5))
        assert [each == "held" for each in held][:5] == [True] * 3 + [False] * 2
        found = got(store, *names)
        assert [at for at, each in enumerate(found) if each is not None] == [3, 4, 5]
        assert MissReason.STORE_GONE not in found
    assert not any(put(store, *names))
    assert not any(got(store, *names))
    raw.delete(Names("kvplug").budget[2])
    raw.rpush(Names("kvplug").budget[2], "x")
    assert not any(got(store, *names)), "what is counted is broken, and the pages are not"
    assert put(store, "new", "page 1") == [PutReason.UNREADABLE, None]


@pytest.mark.parametrize("total", [b"no number", b"9223372036854775807", b"-5"])
def test_a_count_that_was_damaged_is_made_anew(
    server: RedisServer, opened: Any, raw: Any, total: bytes
) -> None:
    store = opened(server.address, size=10 << 20)
    assert put(store, "a", "b") == [None, None]
    counted = raw.get(Names("kvplug").budget[2])
    raw.set(Names("kvplug").budget[2], total)
    assert put(store, "c") == [None]
    assert got(store, "a", "b", "c") == [None] * 3, "pages were evicted since they were counted wrongly"
    assert int(raw.get(Names("kvplug").budget[2])) == int(counted) // 2 * 3


@pytest.mark.parametrize("ttl_s", [None, 3600])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["use", "cost", "total"])
def test_a_record_that_the_server_has_evicted_costs_no_room_for_good(
    server: RedisServer, opened: Any, raw: Any, which: int, ttl_s: float | None
) -> None:
    store = opened(server.address, size=600_000, ttl_s=ttl_s)
    names = [str(number) for number in range(60)]
    assert not any(put(store, *names[:20]))
    whole = len(names_of(raw, "m"))
    assert 8 < whole < 12
    raw.delete(Names("kvplug").budget[which])
    for name in names[20:]:
        assert put(store, name) == [None]
    assert got(store, *names[-whole:]) == [None] * whole
    assert len(names_of(raw, "m")) == whole


GREEDY = """
import resource, sys
sys.path[:0] = [{folder!r}]
from redis_pages import opened, got
with opened({address!r}) as store:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(*got(store, *{names!r}))
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)
"""


@pytest.mark.timing
def test_what_a_stranger_has_stored_takes_no_memory_of_a_reader(
    server: RedisServer, opened: Any, raw: Any
) -> None:
    store = opened(server.address)
    names = ["long value", "long piece", "many pieces", "longer page"]
    assert not any(put(store, *names))
    keys = request(store, *names).keys
    long, _, many, longer = (Names("kvplug").manifest(key) for key in keys)
    raw.set(long, Head(bytes(8), PAGES.nbytes, 0).to_bytes() + bytes(100 << 20))
    raw.set(next(raw.scan_iter(match=b"kvplug:2:p:{" + keys[1].hex().encode() + b"*:3")), bytes(100 << 20))
    raw.set(many, Head(bytes(8), 1 << 20, 1).to_bytes())
    raw.set(longer, Head(bytes(8), 1 << 28, 4096).to_bytes())
    program = GREEDY.format(folder=str(Path(__file__).parent), address=server.address, names=names)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    found, used = done.stdout.splitlines()
    assert set(found.split()) <= {"corrupt", "format", "absent"}, done.stderr
    assert int(used) < 40 << 20
    assert not any(put(store, *names))
    assert not any(got(store, *names))


@pytest.mark.parametrize(
    "reply",
    [
        b"$1000000000000\r\n",
        b"*1000000000\r\n",
        b"*2\r\n$1000000000000\r\n",
        b"+" + bytes(1 << 20),
        b"$x\r\n",
    ],
    ids=["a long value", "many items", "a long item", "an endless line", "no number"],
)
def test_a_server_that_lies_is_refused_before_its_answer_is_read(opened: Any, reply: bytes) -> None:
    class Answers(socketserver.BaseRequestHandler):
        """Answers to everything with the same."""

        def handle(self) -> None:
            with contextlib.suppress(OSError):
                while self.request.recv(1 << 16):
                    self.request.sendall(reply)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answers) as lying:
        lying.daemon_threads, lying.block_on_close = True, False
        threading.Thread(target=lying.serve_forever, daemon=True).start()
        began = time.monotonic()
        found = got(opened("{}:{}".format(*lying.server_address)), "a", "b")
        assert set(found) <= {MissReason.STORE_GONE, MissReason.UNREADABLE}
        assert time.monotonic() - began < 10
        lying.shutdown()


def test_a_killed_server_is_a_miss_at_once_and_a_new_one_is_used(
    server: RedisServer, opened: Any, raw: Any
) -> None:
    store = opened(server.address)
    assert put(store, "a") == [None]
    server.kill()
    began = time.monotonic()
    assert got(store, "a") == [MissReason.STORE_GONE]
    assert time.monotonic() - began < 1
    server.start()
    waits.until(lambda: put(store, "b") == [None], 15, "a page in the new server")
    assert got(store, "a", "b") == [MissReason.ABSENT, None]


def test_a_store_ends_at_once_while_it_connects_to_a_cluster_that_does_not_answer(opened: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = opened(f"127.0.0.1:{silent.getsockname()[1]}", mode="cluster", timeout_s=60)
        jobs = [store.submit_lookup([bytes(32)]) for _ in range(8)]
        waits.Call(store.abort).result(20)
        assert all(job.done for job in jobs)


def said(store: Store, caplog: pytest.LogCaptureFixture) -> str:
    caplog.clear()
    assert got(store, "a") != [None]
    return caplog.text


def test_what_is_wrong_is_named_and_no_password_is_shown(
    server: RedisServer, opened: Any, raw: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    password = tmp_path / "password"
    password.write_text("a long password\n")
    (line,) = (line for line in README.read_text().splitlines() if line.startswith("    ACL SETUSER kv "))
    given = line.split()
    raw.execute_command(*given[:4], ">a long password", *given[5:])
    raw.execute_command("ACL", "SETUSER", "reader", "on", ">a long password", "~*", *READ_ONLY.split())
    raw.execute_command("ACL", "SETUSER", "default", "off")
    assert "Authentication required" in said(opened(server.address), caplog)
    user = {"password_file": str(password)}
    store = opened(server.address, user="kv", size=10 << 20, **user)
    assert put(store, "a") == [None]
    assert got(store, "a") == [None]
    assert list(store.submit_remove(request(store, "a").keys).wait(5)) == [True]
    store.close()
    reader = opened(server.address, user="reader", **user)
    assert put(reader, "a") == [PutReason.READ_ONLY]
    reader.close()
    wrong = tmp_path / "wrong"
    wrong.write_text("a wrong password\n")
    text = said(opened(server.address, user="kv", password_file=str(wrong)), caplog)
    assert "rejects user and password_file" in text and "wrong password" not in text
    assert "long password" not in repr(store) + caplog.text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"address": ["a b"]}, "is not a host name"),
        ({"address": ["a:1", "b:2"]}, "mode is single"),
        ({"user": "kv"}, "password_file: nothing was given"),
        ({"password_file": "/nowhere"}, "cannot be read"),
        ({"tls": True, "tls_ca": "/nowhere"}, "tls_ca: the file cannot be read"),
        ({"mode": "cluster", "db": 1}, "only number 0"),
        ({"piece_bytes": 2 << 20}, "piece_bytes"),
    ],
)
def test_wrong_options_are_named_before_anything_is_connected(
    opened: Any, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        opened(options.pop("address", NOWHERE), **options)


def test_tls(tmp_path: Path, opened: Any, caplog: pytest.LogCaptureFixture) -> None:
    files = certificates(tmp_path)
    port = str(free_port())
    options = ["--tls-port", port, "--tls-cert-file", files["cert"], "--tls-key-file", files["key"]]
    server = RedisServer(tmp_path, *options, "--tls-ca-cert-file", files["ca"])
    try:
        client = {"tls": True, "tls_cert": files["cert"], "tls_key": files["key"]}
        store = opened(f"127.0.0.1:{port}", tls_ca=files["ca"], **client)
        assert put(store, "a") == got(store, "a") == [None]
        text = said(opened(f"127.0.0.1:{port}", tls_ca=files["stranger"], **client), caplog)
        assert "CERTIFICATE_VERIFY_FAILED" in text and "see options.redis.tls_ca" in text
        assert "see options.redis.tls" in said(opened(f"127.0.0.1:{port}"), caplog)
    finally:
        server.kill()


def test_tls_in_a_cluster_checks_the_host(tmp_path: Path, opened: Any) -> None:
    files = certificates(tmp_path, host="elsewhere.test")
    port = str(free_port(below=55_000))
    options = ["--tls-port", port, "--tls-cert-file", files["cert"], "--tls-key-file", files["key"]]
    options += ["--tls-ca-cert-file", files["ca"], "--cluster-enabled", "yes", "--tls-cluster", "yes"]
    server = RedisServer(tmp_path, *options, "--tls-auth-clients", "no")
    try:
        with valkey.Valkey(port=server.port) as raw:
            raw.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            waits.until(lambda: b"cluster_state:ok" in raw.execute_command("CLUSTER", "INFO"), 10)
        tls = {"mode": "cluster", "tls": True, "tls_ca": files["ca"], "piece_bytes": PIECE}
        assert got(opened(f"127.0.0.1:{port}", **tls), "a") == [MissReason.STORE_GONE]
        store = opened(f"127.0.0.1:{port}", tls_check_host=False, **tls)
        assert put(store, "a") == got(store, "a") == [None]
    finally:
        server.kill()


@pytest.fixture
def several(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """Makes servers in folders of their own."""
    made: list[RedisServer] = []

    def make(*options: str, **given: Any) -> RedisServer:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(RedisServer(folder, *options, **given))
        return made[-1]

    yield make
    for each in made:
        each.kill()


@pytest.mark.full
def test_a_sentinel_names_the_new_primary(tmp_path: Path, several: Any, opened: Any) -> None:
    primary = several()
    replica = several("--replicaof", "127.0.0.1", str(primary.port))
    sentinels = []
    for number in range(3):
        file = tmp_path / f"{number}.conf"
        lines = [f"sentinel monitor kv 127.0.0.1 {primary.port} 2"]
        lines += ["sentinel down-after-milliseconds kv 1000", "sentinel failover-timeout kv 5000"]
        file.write_text("\n".join(lines) + "\n")
        sentinels.append(several(str(file), program="sentinel"))
    store = opened([each.address for each in sentinels], mode="sentinel", service="kv")
    assert put(store, "a") == [None]
    raw, sentinel = (valkey.Valkey(port=each.port) for each in (replica, sentinels[0]))
    waits.until(lambda: raw.dbsize() > 0 and raw.info()["master_link_status"] == "up", 20)

    def has_quorum() -> bool:
        try:
            return bool(sentinel.execute_command("SENTINEL", "CKQUORUM", "kv"))
        except valkey.ResponseError:  # NOQUORUM: the sentinels do not know each other yet
            return False

    waits.until(has_quorum, 20)
    time.sleep(3)  # until the sentinels know the replica
    primary.kill()
    waits.until(lambda: put(store, f"b {time.monotonic()}") == [None], 40, "the new primary")
    assert got(store, "a") == [None]


def clustered(*nodes: RedisServer, first: int) -> list[Any]:
    """Make a cluster of two nodes. Returns a client of each. ``first``: how many slots the first node has."""
    clients = [valkey.Valkey(port=node.port) for node in nodes]
    for client, slots in zip(clients, (range(first), range(first, 16384)), strict=True):
        if slots:
            client.execute_command("CLUSTER", "ADDSLOTS", *slots)
    clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[1].port)

    def is_whole(client: Any) -> bool:
        info = client.execute_command("CLUSTER", "INFO")
        return b"cluster_known_nodes:2" in info and b"cluster_state:ok" in info

    waits.until(lambda: all(map(is_whole, clients)), 20, "the cluster")
    return clients


def test_pages_of_a_slot_that_moves_to_a_new_node(
    several: Any, opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = [several("--cluster-enabled", "yes") for _ in range(2)]
    old, new = clustered(*nodes, first=16384)
    store = opened(nodes[0].address, mode="cluster", timeout_s=5)
    assert put(store, "a") == [None]
    (key,) = request(store, "a").keys
    slot = old.execute_command("CLUSTER", "KEYSLOT", Names("kvplug").manifest(key))
    ids = [node.execute_command("CLUSTER", "MYID") for node in (old, new)]
    new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
    old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
    for name in names_of(old)[::2]:
        old.execute_command("MIGRATE", "127.0.0.1", nodes[1].port, name, 0, 5000)
    assert got(store, "a") == [None]
    assert list(store.submit_remove([key]).wait(10)) == [True]
    assert not names_of(old) and not names_of(new), "values of a removed page are left"
    assert put(store, "a", nbytes=1000) == got(store, "a", nbytes=1000) == [None]
    assert list(store.submit_remove([key]).wait(10)) == [True]
    assert put(store, "a") == [PutReason.OTHER], "a page of several values cannot be written meanwhile"
    assert "moves a slot" in caplog.text
    for node in (new, old):
        node.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[1])
    assert put(store, "a") == got(store, "a") == [None]


def test_a_cluster_keeps_the_budget_when_the_node_that_counts_has_lost_its_data(
    several: Any, opened: Any
) -> None:
    nodes = [several("--cluster-enabled", "yes") for _ in range(2)]
    clients = clustered(*nodes, first=8192)
    store = opened([node.address for node in nodes], mode="cluster", size=600_000)
    assert not any(put(store, *map(str, range(20)))) and not any(put(store, "b", "c", nbytes=1000))
    other, counting = clients
    whole = len(names_of(other, "m")) + len(names_of(counting, "m"))
    assert names_of(other, "m") and counting.dbsize() > 2, "the test shows nothing"
    nodes[1].kill()
    nodes[1].start()
    waits.until(lambda: put(store, "new") == [None], 20, "the node")
    assert not any(put(store, *map(str, range(20, 60))))
    assert len(names_of(other, "m")) + len(names_of(counting, "m")) <= whole
    assert counting.hlen(Names("kvplug").budget[1]) <= whole


@pytest.mark.full
def test_a_cluster_keeps_the_budget_and_a_node_alone_says_what_it_is(
    several: Any, opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = [several("--cluster-enabled", "yes") for _ in range(3)]
    addresses = [each.address for each in nodes]
    make = [nodes[0].client, "--cluster", "create", *addresses, "--cluster-yes"]
    subprocess.run(make, check=True, capture_output=True, timeout=60)
    cluster = {"mode": "cluster", "size": 600_000}
    waits.until(lambda: put(opened(addresses[:2], **cluster), "first") == [None], 30, "the cluster")
    store = opened(addresses[:2], **cluster)
    names = [f"page {number}" for number in range(40)]
    assert not any(put(store, *names))
    found = got(store, *names)
    assert set(found) == {None, MissReason.ABSENT} and found[-1] is None
    assert 300_000 < store.usage().used_bytes <= 600_000
    assert len(store.keys(request(store, "a").series)) == found.count(None)
    store.submit_remove(None).wait(10)
    assert all(not valkey.Valkey(port=node.port).dbsize() for node in nodes)
    text = [said(opened(node.address), caplog) for node in nodes]
    assert any("set options.redis.mode to cluster" in each for each in text), "no node has refused"
