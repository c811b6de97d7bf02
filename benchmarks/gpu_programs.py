"""The parts of ``gpu.py`` that are programs of their own: the demo, and the tests that need a GPU."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gpu_children
from gpu_parts import NEVER_RUN, Row, Setting, last_line

from kvplug_testing import peers

HERE = Path(__file__).parent
TREE = HERE.parent


def first_token(setting: Setting, limit_s: float) -> Iterator[Row]:
    """``kvplug demo`` on the GPU, with connector "lookup"."""
    tokens = ["256", "1024", "1800"]
    if setting.quick or not setting.gpus:
        tokens = tokens[:2] if setting.gpus else tokens[:1]
    rounds = str(min(2, setting.rounds))
    more = ["--connectors", "lookup", "--rounds", rounds, "--tokens", *tokens]
    for row in _ttft(setting, "first-token", more, limit_s):
        about = f"{row['prompt_tokens']:,} tokens"
        moved = f"{row['transport']}, transfer {row['transfer_s'] * 1e3:.1f} ms"
        yield Row(part="first-token", what=f"{about}, with the transfer", us=row["ttft_s"] * 1e6, said=moved)
        ratio = f"{row['ratio']:.2f}x of that with it"
        without = row["ttft_recompute_s"] * 1e6
        yield Row(part="first-token", what=f"{about}, recomputed", us=without, said=ratio)


def pulled(setting: Setting, limit_s: float) -> Iterator[Row]:
    """Two processes on one GPU with connector "p2p": out of the blocks of one into those of the other."""
    transports = ["cuda-ipc", "nixl", *(["pynccl"] if setting.gpus > 1 else [])] if setting.gpus else ["shm"]
    for transport in transports:
        size_of = (
            ["--tokens", "1024", "--pairs", "5"] if setting.gpus else ["--tokens", "256", "--pairs", "1"]
        )
        more = ["--connectors", "p2p", "--transport", transport, "--rounds", "1", *size_of]
        try:
            share_s = limit_s / len(transports)
            rows = _ttft(setting, f"pulled-{transport}", more, share_s)
        except OSError as e:
            yield Row(part="pulled", what=f"p2p over {transport}", said=f"{NEVER_RUN}{e}")
            continue
        for row in rows:
            size = row["kv_bytes"]
            with peers.start(gpu_children.copied, setting.device, size, 20, timeout_s=60.0) as child:
                copy_gb_per_s = child.result(60.0)
            yield Row(
                part="pulled",
                what=f"p2p over {row['transport']}, {row['prompt_tokens']:,} tokens",
                nbytes=size,
                gb_per_s=row["gb_per_s"],
                of_copy=row["gb_per_s"] / copy_gb_per_s,
                us=row["ttft_s"] * 1e6,
                said=f"to the first token; tokens identical; {row['of_floor']:.2f} of the floor",
            )


def _ttft(setting: Setting, name: str, more: Sequence[str], limit_s: float) -> list[dict[str, Any]]:
    """The rows of ``ttft.py``.

    Raises:
        OSError: it failed, or its time was over.
    """
    rows = setting.out / f"{name}.json"
    command = [sys.executable, str(HERE / "ttft.py"), "--json", str(rows), "--device", setting.device, *more]
    code, text = bounded(command, limit_s)
    (setting.out / f"{name}.log").write_text(text)
    if code != 0:
        raise OSError(f"ttft.py {_ended(code, limit_s)}; see {name}.log: {last_line(text)}")
    return list(json.loads(rows.read_text()))


TESTS = {
    # what one leaves of its share goes to the next
    "cuda-ipc": ["plugins/kvplug-cuda-ipc/tests/test_cuda_ipc_gpu.py"],
    "the rest": [
        "tests/transport/store/test_staging_tensors.py",
        "plugins/kvplug-host/tests/test_host_devices_tensors.py",
        "plugins/kvplug-lookup/tests/test_lookup_device.py",
        "plugins/kvplug-transformers/tests/test_demo.py",
        "plugins/kvplug-bench/tests/test_bench_device_tensors.py",
        "tests/engine/test_layout_tensors.py",
    ],
    "pynccl": [
        "plugins/kvplug-pynccl/tests/test_pynccl_pipe_gpu.py",
        "plugins/kvplug-pynccl/tests/test_pynccl_communicator_gpu.py",
    ],
}


def tests(setting: Setting, limit_s: float) -> Iterator[Row]:
    """``pytest -m gpu``."""
    options = ["-c", str(TREE / "pyproject.toml"), "--rootdir", str(TREE), "-p", "no:cacheprovider"]
    end = time.monotonic() + limit_s
    for number, (name, paths) in enumerate(TESTS.items()):
        share_s = (end - time.monotonic()) / (len(TESTS) - number)
        setting.tell(f"tests: {name}")
        where = [str(TREE / path) for path in paths]
        command = [sys.executable, "-m", "pytest", *options, "-m", "gpu", "-q", "--color=no", *where]
        code, text = bounded(command, share_s)
        log = f"tests-{name.replace(' ', '-')}.log"
        (setting.out / log).write_text(text)
        last = last_line(text)
        if re.search(r"\d+ (passed|failed|skipped|error)", last) is None:
            last = f"{NEVER_RUN}pytest {_ended(code, share_s)}; {last}"
        elif code is None:
            last = f"not all of them: {last}"
        yield Row(part="tests", what=f"pytest -m gpu, {name}", said=f"{last} ({log})")


def bounded(command: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """A program's exit code, ``None`` where its time was up; and what it wrote.

    It is interrupted some time before, as by Ctrl-C, so that it can say how far it came, and killed then.
    """
    grace_s = min(15.0, limit_s / 4)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as said:
        program = subprocess.Popen(
            command, stdout=said, stderr=subprocess.STDOUT, cwd=folder, start_new_session=True
        )
        code: int | None = None
        try:
            code = program.wait(limit_s - grace_s)
        except subprocess.TimeoutExpired:
            program.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(grace_s)
        finally:
            if code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(program.pid, signal.SIGKILL)  # with those that it has started
                program.wait()
        said.seek(0)
        return code, said.read()


def _ended(code: int | None, limit_s: float) -> str:
    return f"was still at it after {limit_s:.0f} s" if code is None else f"ended with status {code}"
