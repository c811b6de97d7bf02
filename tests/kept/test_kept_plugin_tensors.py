"""The pipe of a plugin from the days of plugin API 1.0 moves tensors between two of today's processes."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

WHEEL = Path(__file__).parent / "kvplug_kept-1.0.0-py3-none-any.whl"

ENDS = {
    "one": """
import kvplug, sys, torch
config = kvplug.Config.from_dict({"transport": "kept-pipe", "timeout_s": 30})
with kvplug.listen_pipe(config, "unix:") as server:
    print(server.contact, flush=True)
    with server.accept(timeout=60) as pipe:
        pipe.send_tensor(torch.arange(300_000, dtype=torch.bfloat16).reshape(3, -1)).wait(30)
        pipe.send_tensor(None)
        print(pipe.recv_tensor().item(), type(pipe.pipe).__module__, flush=True)
""",
    "other": """
import kvplug, sys, torch
config = kvplug.Config.from_dict({
    "transport": "kept-pipe", "timeout_s": 30, "options": {"kept-pipe": {"chunk_bytes": "4 KiB"}}
})
with kvplug.connect_pipe(config, sys.argv[1], timeout=60) as pipe:
    out = torch.empty(3, 100_000, dtype=torch.bfloat16)
    assert pipe.recv_tensor(out=out) is out
    assert torch.equal(out, torch.arange(300_000, dtype=torch.bfloat16).reshape(3, -1))
    assert pipe.recv_tensor() is None
    pipe.send_tensor(torch.tensor(42)).wait(30)
    try:
        pipe.recv_tensor()
    except kvplug.PeerGoneError:
        pass
""",
}


@pytest.mark.full
@pytest.mark.timeout(120)
def test_it_moves_tensors_both_ways(site: Any) -> None:
    with zipfile.ZipFile(WHEEL) as wheel:
        wheel.extractall(site.folder / "site")
    environ = {key: value for key, value in os.environ.items() if not key.startswith("KVPLUG_")}
    given = environ.get("PYTHONPATH", "")
    environ["PYTHONPATH"] = os.pathsep.join([str(site.folder / "site"), *filter(None, [given])])
    with subprocess.Popen(
        [sys.executable, "-c", ENDS["one"]], env=environ, cwd=site.folder, stdout=subprocess.PIPE, text=True
    ) as one:
        try:
            assert one.stdout is not None
            contact = one.stdout.readline().strip()
            other = site.run("-c", ENDS["other"], contact)
            assert other.returncode == 0, other.stderr
            assert one.stdout.read().split() == ["42", "kvplug_kept.pipe"]
            assert one.wait(30) == 0
        finally:
            one.kill()
