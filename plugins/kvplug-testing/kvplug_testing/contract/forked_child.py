"""A forked child of a process with open objects: what it finds there, and what it holds (law ALL-6)."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable

from kvplug_testing import peers, waits
from kvplug_testing.resources import mapped

_SHARED = ("/memfd:", "/dev/shm/", "/dev/zero")  # noqa: S108 - where Linux has it
"""How the names of shared memory begin."""


def in_forked_child(call: Callable[[], str]) -> str:
    """What ``call()`` returns in a forked child of this process, or a description of the error there."""
    readable, writable = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of forks in processes with threads; this test needs them.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            peers.die_with_parent()
            os.close(readable)
            try:
                said = call()
            except BaseException as e:
                said = f"it raised {e!r}"
            os.write(writable, said.encode()[:60_000] or b"-")
        finally:
            os._exit(0)
    os.close(writable)
    try:
        if not peers.is_readable(readable, waits.patience_s):
            os.kill(pid, signal.SIGKILL)
            said = f"it has not ended after {waits.patience_s} s"
        else:
            said = os.read(readable, 60_000).decode()
    finally:
        os.close(readable)
        status = os.waitpid(pid, 0)[1]
    return "" if said == "-" else said or f"it died: {peers.end_of(os.waitstatus_to_exitcode(status))}"


def held() -> str:
    """The descriptors of this process, and the shared memory that it has mapped."""
    shared = [f"{path} is mapped" for path in mapped(os.getpid()) if path.startswith(_SHARED)]
    return "\n".join([*sorted(peers.Resources.of().descriptors), *shared])


def more_than(before: str) -> str:
    """What a forked child holds now beyond ``before``: what :func:`held` returned in an earlier one."""
    # The pipe that reports the result has new descriptors each time.
    now = {line for line in in_forked_child(held).splitlines() if " -> pipe:" not in line}
    return ", ".join(sorted(now - {*before.splitlines()}))
