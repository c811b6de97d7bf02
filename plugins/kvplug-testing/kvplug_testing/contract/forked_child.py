"""A forked child of a process with open objects: what it finds there, and what it holds (law ALL-6)."""

from __future__ import annotations

import collections
import os
import signal
import warnings
from collections.abc import Callable

from kvplug_testing import peers, waits
from kvplug_testing.resources import mapped

_ANSWER = "kvplug-forked-child"
"""Name of the memory in which a child returns a value."""
_SHARED = ("/memfd:", "/dev/shm/", "/dev/zero")  # noqa: S108 - where Linux has it
"""How the names of shared memory begin; the kernel maps rings of its own, too."""


def in_forked_child(call: Callable[[], str]) -> str:
    """What ``call()`` returns in a forked child of this process, or a description of the error there."""
    memory = os.memfd_create(_ANSWER)
    with warnings.catch_warnings():
        # Python 3.12 warns of forks in processes with threads; this test needs them.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            peers.die_with_parent()
            os.write(memory, call().encode())
        except BaseException as e:
            os.write(memory, f"it raised {e!r}".encode())
        finally:
            os._exit(0)
    with open(memory, encoding="utf-8") as answer:
        pidfd = os.pidfd_open(pid)
        has_ended = peers.is_readable(pidfd, waits.patience_s)
        os.close(pidfd)
        if not has_ended:
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if not has_ended:
            return f"it has not ended after {waits.patience_s} s"
        answer.seek(0)
        return f"it died: {peers.end_of(code)}" if code else answer.read()


def held() -> str:
    """The descriptors of this process, and the shared memory that it has mapped."""
    descriptors = sorted(each for each in peers.Resources.of().descriptors if _ANSWER not in each)
    shared = [f"{name} is mapped" for name in sorted(shared_mappings()) if name.startswith(_SHARED)]
    return "\n".join([*descriptors, *shared])


def shared_mappings() -> collections.Counter[str]:
    """The shared memory that this process has mapped, by name."""
    return collections.Counter(mapped(os.getpid(), "s"))


def more_than(before: str) -> str:
    """What a forked child holds now beyond ``before``: what :func:`held` returned in an earlier one."""
    return ", ".join(sorted({*in_forked_child(held).splitlines()} - {*before.splitlines()}))
