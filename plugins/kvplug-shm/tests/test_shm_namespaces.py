"""Processes in other namespaces of one host share memory; in other pid namespaces the ends use heartbeats."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import shm_pipe_ends
import shm_queue_ends
from kvplug import PeerGoneError
from kvplug_testing.comparison import assert_same
from kvplug_testing.waits import until

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]
queue = shm_queue_ends.queue
MIB = 1 << 20
START_S = 90.0
"""How long the other process may take to start: it imports torch, on a machine that may be busy."""

PIPE = """
pipe = shm_pipe_ends.endpoint(heartbeat_timeout_s=2.0).connect(given)
while True:
    pipe.send_tensor(pipe.recv_tensor())
"""
READER = """
handle = shm_queue_ends.QueueEndpoint.Handle.from_plain(given)
reader = shm_queue_ends.endpoint(heartbeat_timeout_s=2.0).create_from_handle(handle, 1)
while True:
    reader.dequeue()
"""


@pytest.fixture(params=[("--ipc",), ("--pid", "--fork", "--kill-child", "--ipc")], ids="".join)
def elsewhere(request: pytest.FixtureRequest) -> Iterator[Callable[[str, Any], subprocess.Popen[bytes]]]:
    """Starts a process in other namespaces: what it runs, and the value that it calls ``given``."""
    command = ["unshare", *request.param]
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here")
    tried = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=30, check=False)
    if tried.returncode:
        pytest.skip(f"namespaces cannot be made here: {tried.stderr.strip()}")
    with ExitStack() as stack:

        def start(code: str, given: Any) -> subprocess.Popen[bytes]:
            path = f"import sys, json; sys.path = {[each for each in sys.path if each]!r}\n"
            imports = "import shm_pipe_ends, shm_queue_ends; given = json.loads(sys.argv[1])\n"
            arguments = [sys.executable, "-c", path + imports + code, json.dumps(given)]
            child = subprocess.Popen([*command, *arguments])
            stack.callback(child.wait)
            stack.callback(child.kill)
            return child

        yield start


def test_a_pipe_into_other_namespaces(elsewhere: Any) -> None:
    with shm_pipe_ends.endpoint(heartbeat_timeout_s=2.0).listen() as listener:
        child = elsewhere(PIPE, listener.contact)
        with listener.accept(START_S) as pipe:
            for _ in range(5):
                sent = torch.randint(0, 255, (3 * MIB,), dtype=torch.uint8)
                pipe.send_tensor(sent)
                assert_same(sent, pipe.recv_tensor())
                time.sleep(0.6)
            child.kill()
            with pytest.raises(PeerGoneError):
                pipe.recv_tensor(timeout=shm_pipe_ends.PATIENCE_S)


def test_a_reader_in_other_namespaces(queue: Any, elsewhere: Any) -> None:
    writer, (reader,) = queue(2, attached=1, heartbeat_timeout_s=2.0)
    child = elsewhere(READER, writer.export_handle().as_plain())
    until(lambda: "not come" not in writer.readers[1].process, START_S)
    for _ in range(4 * shm_queue_ends.CHUNKS):
        sent = torch.randint(0, 255, (MIB,), dtype=torch.uint8)
        writer.enqueue(sent)
        assert_same(sent, reader.dequeue())
    time.sleep(3.0)
    assert not writer.readers[1].gone, "a reader that only waits counts as dead"
    child.kill()
    until(lambda: writer.readers[1].gone)
    assert writer.readers[1].died
    for number in range(2 * shm_queue_ends.CHUNKS):
        writer.enqueue(number)
        assert reader.dequeue() == number
