"""What strangers cost honest clients of a listener, and what TLS costs the pipe "cpu".

    python benchmarks/trust.py [--rounds N] [--json FILE] [--markdown FILE]

Strangers: a listener at 127.0.0.1 with a secret, clients that dial it one after the other, and 50 connections
a second of another user that send garbage. It needs root (another user).

TLS: two processes, the pipe "cpu" with one TCP connection, without and with TLS in turns. It needs trustme.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import harness

STRANGERS_PER_S = 50
DIALS = 200
SECRET = "the secret of this benchmark"  # noqa: S105
SIZES = {"4 KiB": 4 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20, "64 MiB": 64 << 20}
BURST_BYTES = 256 << 20


def sorted_ms(call: Callable[[], object], times: int) -> list[float]:
    return sorted(1e3 * harness.seconds(call)[0] for _ in range(times))


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


def measure_strangers() -> str:
    from kvplug.net.trust.connection import Connection
    from kvplug.net.trust.credentials import Credentials, Secret
    from kvplug.transport import Acceptor
    from kvplug_testing.pairs import accepting

    if os.geteuid() != 0:
        return "strangers: not run: it needs root"
    ours = Credentials(Secret(SECRET))
    rows = []
    for per_second in (0, STRANGERS_PER_S):
        with accepting("127.0.0.1:0", ours, "benchmark") as listener, ExitStack() as stack:

            def once(listener: Acceptor[Connection] = listener) -> None:
                Connection.dial(listener.contact, ours, "benchmark", 10).close()
                listener.accept(10).close()

            if per_second:
                port = listener.contact.rpartition(":")[2]
                harness.started(stack, [sys.executable, "-c", STRANGER, port, per_second])
                time.sleep(1)
            took = sorted_ms(once, DIALS)
            refused = sum(listener.refusals.values())
        of_dials = statistics.median(took), took[int(len(took) * 0.99)], took[-1]
        rows.append([per_second, refused, *(f"{each:.1f}" for each in of_dials)])
    return harness.table(["strangers a second", "refused", "dial, ms", "99 %, ms", "slowest, ms"], rows)


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
        took, pipe = harness.seconds(lambda: connect_pipe(Config.from_dict(config), contact))
        figures["connect, ms"] = 1e3 * took
        for name, size in SIZES.items():
            tensor = torch.ones(size, dtype=torch.uint8)
            child.send(size)
            if size <= 1 << 16:
                back = torch.empty_like(tensor)

                def there_and_back(tensor: Any = tensor, back: Any = back) -> None:
                    pipe.send_tensor(tensor)
                    pipe.recv_tensor(out=back)

                figures[f"{name} there and back, us"] = 1e3 * statistics.median(
                    sorted_ms(there_and_back, 500)
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


def measure_tls(rounds: int) -> str:
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
        configs = {"without": plain, "with TLS": tls}
        found = harness.rounds(configs, rounds, lambda name: one_round(configs[name]))
    rows = [
        [
            what,
            *(f"{statistics.median(each[what]):.3g}" for each in found.values()),
            f"{harness.ratio(found['with TLS'][what], taken):.2f}",
        ]
        for what, taken in found["without"].items()
    ]
    return harness.table(["pipe `cpu`, one TCP connection", *found, "ratio"], rows)


def main() -> None:
    given = harness.parser(__doc__, 7).parse_args()
    about = f"{given.rounds} rounds, medians. {harness.machine()}"
    harness.write(given, measure_strangers(), measure_tls(given.rounds), about)


if __name__ == "__main__":
    main()
