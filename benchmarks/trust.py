"""What strangers cost honest clients of a listener, and what TLS costs the pipe "cpu".

    python benchmarks/trust.py [--rounds N] [--json FILE] [--markdown FILE]

Strangers: a listener at 127.0.0.1 with a secret, clients that dial it one after the other, and 50 connections
a second of another user that send garbage. It needs root (another user).

TLS: two processes, the pipe "cpu" with one TCP connection, without and with TLS in turns. It needs trustme.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

STRANGERS_PER_S = 50
DIALS = 200
SECRET = "the secret of this benchmark"  # noqa: S105
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


STRANGER = """
import os, socket, sys, time
socket.getaddrinfo("127.0.0.1", 1); "".encode("idna")  # the other user may not be able to read the libraries
os.setgid(65534); os.setuid(65534)
begun, number = time.monotonic(), 0
while True:
    try:
        with socket.create_connection(("127.0.0.1", int(sys.argv[1])), 1) as s:
            s.sendall(b"KVPT\\2\\2\\0\\0" + bytes(64))
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


def measure_strangers() -> list[dict[str, Any]] | str:
    from kvplug.net.trust.connection import Connection
    from kvplug.net.trust.credentials import Credentials, Secret
    from kvplug.transport import Acceptor
    from kvplug_testing.pairs import accepting

    if os.geteuid() != 0:
        return "not run: it needs root"
    ours = Credentials(Secret(SECRET))
    rows = []
    for per_second in (0, STRANGERS_PER_S):
        with accepting("127.0.0.1:0", ours, "benchmark") as listener:

            def once(listener: Acceptor[Connection] = listener) -> None:
                Connection.dial(listener.contact, ours, "benchmark", 10).close()
                listener.accept(10).close()

            with strangers(int(listener.contact.rpartition(":")[2]), per_second):
                took = median_ms(once, DIALS)
                refused = sum(listener.refusals.values())
        rows.append(
            {
                "strangers_per_s": per_second,
                "refused": refused,
                "dial_ms": statistics.median(took),
                "dial_p99_ms": took[int(len(took) * 0.99)],
                "dial_most_ms": took[-1],
            }
        )
    return rows


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
        os.environ["KVPLUG_SECRET"] = SECRET
        plain = {
            "transport": "cpu",
            "host": "127.0.0.1",
            "options": {"cpu": {"socket": "tcp", "connections": 1}},
        }
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
            "| strangers a second | refused | dial, ms | 99 %, ms | slowest, ms |",
            "| ---: | ---: | ---: | ---: | ---: |",
        ]
        lines += [
            f"| {row['strangers_per_s']} | {row['refused']} | {row['dial_ms']:.1f}"
            f" | {row['dial_p99_ms']:.1f} | {row['dial_most_ms']:.1f} |"
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
    options = parser.parse_args()
    result = {
        "machine": f"Python {platform.python_version()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
        "rounds": options.rounds,
        "strangers": measure_strangers(),
        "tls": measure_tls(options.rounds),
    }
    print(tables(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(tables(result) + "\n")


if __name__ == "__main__":
    main()
