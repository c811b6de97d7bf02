"""Pipes "nixl" for tests: both ends here, or one in a process of its own."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import threading
import time
from functools import partial
from typing import Any

import torch

from kvplug.transport import Credentials, PipeEndpoint
from kvplug_nixl.agent import Agent
from kvplug_nixl.pipe.endpoint import NixlEndpoint
from kvplug_nixl.pipe.options import NixlPipeOptions
from kvplug_testing.peers import Parent
from kvplug_testing.waits import Call

MIB = 1 << 20
PATIENCE_S = 30.0


def endpoint(**options: Any) -> NixlEndpoint:
    given = {"expected_gb_per_s": 0.0, **options}
    return NixlEndpoint(
        PipeEndpoint.Context(
            options=NixlPipeOptions(**given), credentials=Credentials(), timeout_s=PATIENCE_S
        )
    )


def pattern(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def connect_in_a_fork(parent: Parent) -> None:
    """What a process says that was forked from one with UCX."""
    listener = endpoint().listen()
    connecting = Call(lambda: endpoint().connect(listener.contact))
    accepted = listener.accept()
    pid = os.fork()
    if not pid:
        try:
            endpoint().connect(listener.contact)
            parent.send("it connected")
        except Exception as e:
            parent.send(str(e))
        os._exit(0)
    os.waitpid(pid, 0)
    accepted.abort()
    connecting.result().abort()
    listener.close()


def fork_while_registering(parent: Parent, seconds: float) -> None:
    """Fork again and again while threads register memory and let go of it.

    The forks fail for want of processes, after the handlers of ``pthread_atfork`` have run: so there are
    thousands of them a second. Even so, what they disturb is disturbed in every second run only.
    """
    agents = [Agent(error_handling="none", only_loopback=True) for _ in range(4)]
    no_more = threading.Event()

    def register(agent: Agent) -> None:
        while not no_more.is_set():
            agent.release(agent.export([torch.empty(5000, dtype=torch.uint8) for _ in range(8)]).regions)

    registering = [Call(partial(register, agent)) for agent in agents]
    if os.geteuid() == 0:
        os.setresuid(65534, 65534, 65534)  # the limit is not root's
    resource.setrlimit(resource.RLIMIT_NPROC, (0, resource.getrlimit(resource.RLIMIT_NPROC)[1]))
    sys.setswitchinterval(1e-6)  # so that the threads are anywhere when this one forks
    end = time.monotonic() + seconds
    while time.monotonic() < end and not any(call.ended for call in registering):
        with contextlib.suppress(BlockingIOError):
            if not os.fork():
                os._exit(0)
            raise AssertionError("the limit of processes does not count")
    no_more.set()
    for call, agent in zip(registering, agents, strict=True):
        call.result()
        agent.close()
