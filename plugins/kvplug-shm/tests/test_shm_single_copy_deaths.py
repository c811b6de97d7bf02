"""Offers of memory to another process that stops, dies or becomes another program."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvplug import ClosedError, PeerGoneError, TimeoutError
from kvplug.testing import peers
from kvplug.testing.waits import until

HERE = Path(__file__)
ends = SimpleNamespace(**run_path(str(HERE.with_name("single_copy_ends.py"))))

there_are_huge_pages = ends.there_are_huge_pages

huge, NBYTES, endpoint = ends.huge, ends.NBYTES, ends.endpoint
attaching = SimpleNamespace(**run_path(str(HERE.with_name("attaching.py"))))
readable_child, readable_parent = attaching.readable_child, attaching.readable_parent


def far_end(parent: peers.Parent, what: str) -> Any:
    contact = parent.recv()
    with endpoint(single_copy=True).connect(contact) as pipe:
        return globals()[what](parent, pipe)


def offer_and_wait(parent: peers.Parent, pipe: Any) -> None:
    tensor = huge(NBYTES, 7)
    pipe.send_tensor(tensor)
    parent.send("offered")
    parent.recv()


def offer_and_become_another_program(parent: peers.Parent, pipe: Any) -> None:
    pipe.send_tensor(huge(NBYTES, 7))
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)"])  # noqa: S606


def take_a_part(parent: peers.Parent, pipe: Any) -> None:
    parent.recv()
    try:
        pipe.recv_tensor(timeout=0)
    except TimeoutError as e:
        parent.send(str(e))
    parent.recv()


@pytest.fixture
def far() -> Iterator[Callable[[str], tuple[Any, peers.Peer]]]:
    with ExitStack() as stack:

        def make(what: str) -> tuple[Any, peers.Peer]:
            child = stack.enter_context(peers.start(f"{HERE}:far_end", what, timeout_s=120))
            listener = endpoint(single_copy=True).listen()
            stack.callback(listener.close)
            child.send(listener.contact)
            pipe = listener.accept()
            stack.callback(pipe.abort)
            return pipe, child

        yield make


@pytest.mark.usefixtures("readable_child")
def test_a_process_that_is_stopped_is_read(far: Any) -> None:
    pipe, child = far("offer_and_wait")
    assert child.recv() == "offered"
    os.kill(child.pid, signal.SIGSTOP)
    try:
        assert torch.equal(pipe.recv_tensor(timeout=30), huge(NBYTES, 7))
    finally:
        os.kill(child.pid, signal.SIGCONT)
    child.send(None)


@pytest.mark.usefixtures("readable_child")
@pytest.mark.parametrize("begun", [False, True])
def test_an_offer_goes_with_its_process(far: Any, begun: bool) -> None:
    pipe, child = far("offer_and_wait")
    assert child.recv() == "offered"
    if begun:
        with pytest.raises(TimeoutError):
            pipe.recv_tensor(timeout=0)
    child.kill()
    for _ in range(2):
        with pytest.raises(PeerGoneError):
            pipe.recv_tensor(timeout=30)


@pytest.mark.usefixtures("readable_child")
def test_an_offer_goes_with_its_program(far: Any) -> None:
    pipe, child = far("offer_and_become_another_program")
    until(lambda: "ended" in repr(pipe))
    for _ in range(2):
        with pytest.raises(PeerGoneError):
            pipe.recv_tensor(timeout=30)
    child.kill()


@pytest.mark.usefixtures("readable_parent")
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_the_memory_is_the_senders_again_when_its_reader_is_no_more(far: Any, how: str) -> None:
    pipe, child = far("take_a_part")
    ended = threading.Event()
    sent = pipe.send_tensor(huge(NBYTES))
    sent.add_done_callback(lambda _: ended.set())
    child.send(None)
    assert "have arrived" in child.recv()
    assert not ended.is_set()
    if how == "killed":
        child.kill()
        assert ended.wait(30)
        assert isinstance(sent.error(), PeerGoneError)
    else:
        os.kill(child.pid, signal.SIGSTOP)
        try:
            pipe.close(timeout=0.1)
            assert ended.wait(30)
            assert isinstance(sent.error(), ClosedError)
        finally:
            os.kill(child.pid, signal.SIGCONT)
        child.send(None)
    assert pipe.held.queued == 0
