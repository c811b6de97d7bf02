"""A pipe around any other one that injects faults into the messages that it sends.

Faults happen at this end only: the other end needs no rules. Lookup buffers and connectors communicate over
pipes, so faults of pipes are theirs, too.
"""

from __future__ import annotations

import contextlib
import logging
import random
import signal
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Literal

import attrs

from kvplug import KvplugError, TimeoutError
from kvplug.transport import (
    Deadline,
    Pipe,
    Timeout,
    Transfer,
)
from kvplug_testing.pairs import PipeAround

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)
_LEAVING_S: Final = 5.0
"""The longest time that ``kill`` waits until earlier messages have left."""

Fault = Literal["flip", "slow", "kill"]


@attrs.frozen
class Rule:
    """A fault, and which messages of a pipe have it: those that meet every condition."""

    do: Fault
    """``flip``: some bits of a copy are inverted. ``slow``: the call waits as long as the bytes take at
    ``bytes_per_s``. ``kill``: of this process.
    """
    message: int | None = None
    """Its number, from 1; smaller messages than ``min_bytes`` are not counted."""
    min_bytes: int = 0
    bits: int = 1
    bytes_per_s: int = 1

    @classmethod
    def parsed(cls, text: str) -> Rule:
        """A rule in words, such as ``"flip message=1 bits=20"``."""
        do, *conditions = text.split()
        pairs = [condition.partition("=") for condition in conditions]
        return cls(do, **{name: int(value) for name, _, value in pairs})  # type: ignore[arg-type]


class FaultyPipe(PipeAround):
    """A pipe around another one. Without rules it behaves like that one."""

    def __init__(self, pipe: Pipe, rules: Sequence[Rule], *, when: Callable[[], bool] | None = None) -> None:
        """With ``when`` a fault happens only if it returns true."""
        super().__init__(pipe)
        self._counted = dict.fromkeys(rules, 0)
        self._when = when
        self._random = random.Random(1)
        self._last: Transfer | None = None
        self._over = threading.Event()

    def path_report(self) -> Pipe.PathReport:
        return self._pipe.path_report()

    def _send_tensor(self, tensor: Tensor | None, timeout: Timeout) -> Transfer:
        deadline = Deadline.after(timeout, 60.0)
        nbytes = 0 if tensor is None else tensor.nbytes
        for rule in self._hits(nbytes):
            _log.info("injected: %s, %d bytes to %s", rule, nbytes, self.peer)
            if rule.do == "flip":
                tensor = None if tensor is None else self._flipped(tensor, rule.bits)
            elif rule.do == "slow":
                self._hold(nbytes / rule.bytes_per_s, deadline)
            else:
                with contextlib.suppress(KvplugError):
                    if self._last is not None:
                        self._last.wait(_LEAVING_S)
                # To this thread: one to the process counts once some thread has received it.
                signal.pthread_kill(threading.get_ident(), signal.SIGKILL)
        self._last = self._pipe.send_tensor(tensor, timeout=timeout)
        return self._last

    def _close(self, timeout: Timeout) -> None:
        self._over.set()
        super()._close(timeout)

    def _abort(self) -> None:
        self._over.set()
        super()._abort()

    def _hits(self, nbytes: int) -> list[Rule]:
        """Count the next message. Returns the rules that it meets."""
        hits = []
        for rule in self._counted:
            if nbytes >= rule.min_bytes:
                self._counted[rule] += 1
                is_hit = rule.message in (None, self._counted[rule])
                if is_hit and (self._when is None or self._when()):
                    hits.append(rule)
        return hits

    def _flipped(self, tensor: Tensor, bits: int) -> Tensor:
        """A copy with so many different bits inverted, or all, if it has fewer."""
        import torch

        copy = tensor.contiguous().clone()
        octets = copy.view(-1).view(torch.uint8)
        for at in self._random.sample(range(8 * len(octets)), min(bits, 8 * len(octets))):
            octets[at // 8] ^= 1 << at % 8
        return copy

    def _hold(self, seconds: float, deadline: Deadline) -> None:
        """Raises TimeoutError: the deadline came first."""
        left = deadline.remaining()
        self._over.wait(seconds if left is None else min(seconds, left))
        if left is not None and left < seconds:
            raise TimeoutError("an injected fault holds this message up")
