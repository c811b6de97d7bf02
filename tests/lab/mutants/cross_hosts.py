"""Transports that claim ``cross_host``, with one fault each that only shows between two hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

from kvplug.errors import TransportError
from kvplug_testing import (
    DeviceCommunicatorContract,
    LookupBufferContract,
    MessageQueueContract,
    PipeContract,
)


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text()


HERE = boot_id()
"""Of the host where this file was imported."""
patience_s = 5.0
"""Each end starts in a process of a namespace of its own, which takes seconds on a busy machine."""


class Faulty:
    """No fault: a context is used as it is."""

    def changed(self, context: Any) -> Any:
        return context

    def make_endpoint(self, context: Any) -> Any:
        return super().make_endpoint(self.changed(context))  # type: ignore[misc]

    def make_communicator(self, context: Any) -> Any:
        return super().make_communicator(self.changed(context))  # type: ignore[misc]


class StaysOnItsHost:
    """It works only where it was installed."""

    def changed(self, context: Any) -> Any:
        if boot_id() != HERE:
            raise TransportError("this is another host")
        return context


class ListensOnLoopback:
    """It listens where no other host can connect, whatever host it was given."""

    def changed(self, context: Any) -> Any:
        return attrs.evolve(context, host="unix:@kvplug")


class HearsNoSilence:
    """However long a peer is silent, it is taken to be alive."""

    def changed(self, context: Any) -> Any:
        return attrs.evolve(context, heartbeat_timeout_s=1000.0)


# -- pipes -----------------------------------------------------------------------------------------


class Pipe(Faulty, PipeContract):
    transport = "cpu"


class TestPipeStaysOnItsHost(StaysOnItsHost, Pipe):
    breaks = ("END-1",)


class TestPipeListensOnLoopback(ListensOnLoopback, Pipe):
    breaks = ("PIPE-1",)


class TestPipeHearsNoSilence(HearsNoSilence, Pipe):
    breaks = ("ALL-3", "ALL-5")


class TestPipeHasNoFault(Pipe):
    is_control = True


# -- message queues ----------------------------------------------------------------------------------


class Queue(Faulty, MessageQueueContract):
    transport = "shm"


class TestQueueStaysOnItsHost(StaysOnItsHost, Queue):
    breaks = ("QUEUE-1",)


class TestQueueHearsNoSilence(HearsNoSilence, Queue):
    breaks = ("ALL-3", "ALL-5")


class TestQueueHasNoFault(Queue):
    is_control = True


# -- communicators and lookup buffers ----------------------------------------------------------------


class Communicator(Faulty, DeviceCommunicatorContract):
    transport = "cpu"


class TestCommunicatorListensOnLoopback(ListensOnLoopback, Communicator):
    breaks = ("COMM-1",)


class TestCommunicatorHasNoFault(Communicator):
    is_control = True


class Lookup(Faulty, LookupBufferContract):
    transport = "simple"


class TestLookupStaysOnItsHost(StaysOnItsHost, Lookup):
    breaks = ("LOOKUP-7",)


class TestLookupHasNoFault(Lookup):
    is_control = True
