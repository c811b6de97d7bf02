"""What strangers cost honest clients of a loopback listener, and what TLS costs the pipe "cpu".

    python benchmarks/trust.py [--rounds N] [--json FILE] [--markdown FILE]

Strangers: a listener at 127.0.0.1 that checks users (no secret), clients that dial it one after the other,
and 50 connections a second of another user that send garbage, in a network namespace of its own, with few and
with 40,000 connections in TIME_WAIT. It needs root (another user, a namespace), `unshare`, and 1 minute.
Beside it: one look at the kernel's tables of all sockets, which finding the user takes without sock_diag.

TLS: two processes, the pipe "cpu" with one TCP connection, without and with TLS in turns. It needs trustme.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import platform
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROWS = 40_000
STRANGERS_PER_S = 50
DIALS = 200
NOBODY = 65534
SIZES = {"4 KiB": 4 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20, "64 MiB": 64 << 20}
BURST_BYTES = 256 << 20


def median_ms(call: Callable[[], object], times: int) -> list[float]:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        taken.append(1e3 * (time.perf_counter() - began))
    return sorted(taken)


# -- strangers ---------------------------------------------------------------------------------------


def loopback_up() -> None:
    """A new network namespace has it, switched off."""
    with socket.socket() as sock:
        fcntl.ioctl(sock, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS: UP, RUNNING


def fill_with_time_wait(count: int) -> None:
    """The end that closes first stays in TIME_WAIT for a minute."""
    Path("/proc/sys/net/ipv4/tcp_max_tw_buckets").write_text(str(2 * ROWS))
    Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("1024 65000")
    Path("/proc/sys/net/ipv4/tcp_tw_reuse").write_text("0")  # on loopback they are reused after a second
    with socket.create_server(("0.0.0.0", 1023), backlog=1024) as listening:
        for number in range(count):
            # To many addresses: a free port is hard to find when one has most of them.
            with socket.create_connection((f"127.0.0.{2 + number % 100}", 1023)):
                theirs, _ = listening.accept()
            theirs.close()


def time_wait_rows() -> int:
    return Path("/proc/self/net/tcp").read_text().count(" 06 ")


STRANGER = """
import os, socket, sys, time
socket.getaddrinfo("127.0.0.1", 1); "".encode("idna")  # the other user may not be able to read the libraries
os.setgid(65534); os.setuid(65534)
begun, number = time.monotonic(), 0
while True:
    try:
        with socket.create_connection(("127.0.0.1", int(sys.argv[1])), 1) as s:
            s.sendall(b"KVPT\\2\\3\\0\\0" + bytes(64))
            s.settimeout(0.05)
            try: s.recv(100)
            except TimeoutError: pass
    except OSError: pass
    number += 1
    time.sleep(max(0, begun + number / int(sys.argv[2]) - time.monotonic()))
"""


@contextlib.contextmanager
def strangers(port: int, per_second: int) -> Iterator[None]:
    if not per_second:
        yield
        return
    child = subprocess.Popen([sys.executable, "-c", STRANGER, str(port), str(per_second)])
    try:
        time.sleep(1)
        yield
    finally:
        child.kill()
        child.wait()


def measure_strangers() -> list[dict[str, Any]]:
    from kvplug.net.trust.credentials import Credentials
    from kvplug.net.trust.listener import Listener, dial
    from kvplug.net.trust.peercred import tcp_peer_uid_at_once, tcp_peer_uids

    loopback_up()
    rows = []
    for count in (0, ROWS):
        for per_second in (0, STRANGERS_PER_S):
            fill_with_time_wait(max(0, count - time_wait_rows()))
            with Listener.open("127.0.0.1:0", Credentials(), "benchmark") as listener:

                def once(listener: Listener = listener) -> None:
                    dial(listener.address, Credentials(), "benchmark", 10).close()
                    listener.accept(10).close()

                with strangers(int(listener.address.rpartition(":")[2]), per_second):
                    took = median_ms(once, DIALS)
                    refused = sum(listener.refusals.values())
            with (
                socket.create_server(("127.0.0.1", 0)) as s,
                socket.create_connection(s.getsockname()) as ours,
            ):
                theirs, _ = s.accept()
                with theirs:
                    exact = median_ms(lambda ours=ours: tcp_peer_uid_at_once(ours), 50)
                    tables = median_ms(lambda ours=ours: tcp_peer_uids([ours]), 3)
            rows.append(
                {
                    "time_wait": time_wait_rows(),
                    "strangers_per_s": per_second,
                    "refused": refused,
                    "dial_ms": statistics.median(took),
                    "dial_p99_ms": took[int(len(took) * 0.99)],
                    "dial_most_ms": took[-1],
                    "exact_ms": statistics.median(exact),
                    "tables_ms": statistics.median(tables),
                }
            )
    return rows


def in_a_namespace() -> list[dict[str, Any]] | str:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return "not run: it needs root and the program unshare"
    done = subprocess.run(
        ["unshare", "--net", sys.executable, __file__, "--strangers-here"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        return f"not run: exit code {done.returncode}"
    return json.loads(done.stdout)


# -- TLS ---------------------------------------------------------------------------------------------


def receiver(parent: Any, config: dict[str, Any]) -> None:
    import torch

    from kvplug import Config, listen_pipe

    with listen_pipe(Config.from_dict(config), "127.0.0.1:0") as server:
        parent.send(server.contact)
        pipe = server.accept()
    while (size := parent.recv()) is not None:
        out = torch.empty(size, dtype=torch.uint8)
        for _ in range(max(8, BURST_BYTES // size) if size > 1 << 16 else 500):
            pipe.recv_tensor(out=out)
            if size <= 1 << 16:
                pipe.send_tensor(out)
        parent.send(size)
    pipe.close()


def one_round(config: dict[str, Any]) -> dict[str, float]:
    import torch

    from kvplug import Config, connect_pipe
    from kvplug_testing import peers

    figures = {}
    with peers.start(receiver, config, timeout_s=120) as child:
        contact = child.recv()
        began = time.perf_counter()
        pipe = connect_pipe(Config.from_dict(config), contact)
        figures["connect, ms"] = 1e3 * (time.perf_counter() - began)
        for name, size in SIZES.items():
            tensor = torch.ones(size, dtype=torch.uint8)
            child.send(size)
            if size <= 1 << 16:
                back = torch.empty_like(tensor)

                def there_and_back(tensor: Any = tensor, back: Any = back) -> None:
                    pipe.send_tensor(tensor)
                    pipe.recv_tensor(out=back)

                figures[f"{name} there and back, us"] = 1e3 * statistics.median(
                    median_ms(there_and_back, 500)
                )
                child.recv()
                continue
            count = max(8, BURST_BYTES // size)
            began = time.perf_counter()
            for _ in range(count):
                pipe.send_tensor(tensor)
            child.recv()
            figures[f"{name}, GB/s"] = count * size / (time.perf_counter() - began) / 1e9
        child.send(None)
        pipe.close()
    return figures


def measure_tls(rounds: int) -> list[dict[str, Any]]:
    import trustme

    with tempfile.TemporaryDirectory() as folder:
        ca = trustme.CA(key_type=trustme.KeyType.ECDSA)
        leaf = ca.issue_cert("127.0.0.1", key_type=trustme.KeyType.ECDSA)
        leaf.private_key_and_cert_chain_pem.write_to_path(f"{folder}/both.pem")
        ca.cert_pem.write_to_path(f"{folder}/ca.pem")
        plain = {"transport": "cpu", "options": {"cpu": {"socket": "tcp", "connections": 1}}}
        files = {"tls_cert": "both.pem", "tls_key": "both.pem", "tls_ca": "ca.pem"}
        tls = {**plain, **{key: f"{folder}/{name}" for key, name in files.items()}}
        taken = [(one_round(plain), one_round(tls)) for _ in range(rounds)]
    return [
        {
            "what": what,
            "plain": statistics.median(a[what] for a, _ in taken),
            "tls": statistics.median(b[what] for _, b in taken),
            "ratio": statistics.median(b[what] / a[what] for a, b in taken),
        }
        for what in taken[0][0]
    ]


# -- the tables --------------------------------------------------------------------------------------


def tables(result: dict[str, Any]) -> str:
    lines = []
    if isinstance(result["strangers"], str):
        lines += [f"strangers: {result['strangers']}"]
    else:
        lines += [
            (
                "| TIME_WAIT | strangers a second | refused | dial, ms | 99 %, ms | slowest, ms"
                " | exact, ms | tables, ms |"
            ),
            "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        lines += [
            f"| {row['time_wait']:,} | {row['strangers_per_s']} | {row['refused']} | {row['dial_ms']:.1f}"
            f" | {row['dial_p99_ms']:.1f} | {row['dial_most_ms']:.1f} | {row['exact_ms']:.3f}"
            f" | {row['tables_ms']:.1f} |"
            for row in result["strangers"]
        ]
    lines += [
        "",
        "| pipe `cpu`, one TCP connection | without | with TLS | ratio |",
        "| --- | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row['what']} | {row['plain']:.3g} | {row['tls']:.3g} | {row['ratio']:.2f} |"
        for row in result["tls"]
    ]
    lines += ["", f"{result['rounds']} rounds, medians. {result['machine']}"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="of the part about TLS")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--strangers-here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.strangers_here:
        threading.excepthook = lambda args: os._exit(1)
        print(json.dumps(measure_strangers()))
        return
    result = {
        "machine": f"Python {platform.python_version()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
        "rounds": options.rounds,
        "strangers": in_a_namespace(),
        "tls": measure_tls(options.rounds),
    }
    print(tables(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(tables(result) + "\n")


if __name__ == "__main__":
    main()
