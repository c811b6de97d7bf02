"""The pipe and the connector of a plugin from the days of plugin API 1.0, between today's ends and engine."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

WHEEL = Path(__file__).parent / "kvplug_kept-1.0.0-py3-none-any.whl"
PROGRAM = """
import torch
from kvplug import Config, PeerGoneError, connect_pipe, listen_pipe
from kvplug_testing.engine import FakeEngine, request_of
from kvplug_testing.waits import Call

def config(**options):
    return Config.from_dict({"transport": "kept-pipe", "timeout_s": 30, "options": {"kept-pipe": options}})

with listen_pipe(config(), "unix:") as server:
    joining = Call(lambda: connect_pipe(config(chunk_bytes="4 KiB"), server.contact))
    one, other = server.accept(), joining.result(30)
assert type(one.pipe).__module__ == "kvplug_kept.pipe"
tensor = torch.arange(300_000, dtype=torch.bfloat16).reshape(3, -1)
sending = Call(lambda: [one.send_tensor(each).wait(30) for each in (tensor, None)])
out = torch.empty_like(tensor)
assert other.recv_tensor(out=out) is out and torch.equal(out, tensor)
assert other.recv_tensor() is None
sending.result(30)
other.send_tensor(torch.tensor(42)).wait(30)
assert one.recv_tensor().item() == 42
one.close()
try:
    other.recv_tensor()
    raise AssertionError("it has received what was not sent")
except PeerGoneError:
    other.close()

with FakeEngine(Config.from_dict({"connector": "kept-connector", "role": "both"})) as engine:
    request = request_of("r", range(40))
    blocks, loaded, report = engine.load(request)
    assert not loaded and not report.invalid_block_ids
    engine.finish(request, blocks)
    assert engine.worker.layers == list(engine.layer_names)
    print([call[0] for call in engine.scheduler.calls])
"""


@pytest.mark.timeout(120)
def test_its_pipe_moves_tensors_both_ways_and_its_connector_serves_an_engine(site: Any) -> None:
    with zipfile.ZipFile(WHEEL) as wheel:
        wheel.extractall(site.folder / "site")
    done = site.run("-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("['match', 'alloc', ") and "'finished'" in done.stdout
