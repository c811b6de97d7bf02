"""The device communicator: collectives of one group of ranks on one kind of device.

The names and arguments are those of the family's base communicator; its defects (a global config read in the
constructor, layers found by their classes' names, ``assert`` for arguments, missing v-forms, no deadline) are
not. The work that all transports share is done here: checking arguments, computing sizes, serving a group of
one rank without a transport, and comparing the calls of the ranks. A transport of kind "communicator"
implements :class:`~kvplug.transport.communicator.primitives.Primitives`. ``Tensor`` is ``torch.Tensor``;
this package does not import torch at module level.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from kvplug.net.deadline import DEFAULT_TIMEOUT, Timeout
from kvplug.net.threads import end_at_exit
from kvplug.transport.communicator.collectives import Collectives
from kvplug.transport.communicator.moe import MoE
from kvplug.transport.communicator.point_to_point import PointToPoint

if TYPE_CHECKING:
    from kvplug.transport.context import CommunicatorContext


class DeviceCommunicator(Collectives, PointToPoint, MoE):
    """One rank's end of the collectives of a group.

    Law. Every rank gets the result that the collective's documentation states, whatever the order in which
    ranks call it. A collective ends when every rank has called it, in the same order of calls; a rank that
    does not call it in time, or has died, is named in the ``TimeoutError`` or ``PeerGoneError`` of all the
    others. After either the communicator is broken, since ranks would be in different calls from then on:
    later calls raise ``TransportError`` at once, and the caller must make a new communicator. Tensors and
    arguments that do not fit are refused before the call begins, at every rank if :attr:`compares` is true,
    and the communicator stays usable.

    Callers. The engine's model code, every rank the same calls in the same order, one thread at a time (else
    ``BusyError``); ``destroy`` from any thread. ``send``, ``recv`` and ``batch_isend_irecv`` are called by
    the ranks they name.

    Not promised. That ``send`` returns before the other rank receives: two ranks that both send first wait
    for each other. Two that do so in one batch do not.

    A transport may have an option by which calls return before the device is done. Then a call raises the
    errors of earlier calls, and results are valid once ``synchronize`` has returned.

    Raises:
        ConfigError: the context's ``ranks`` are not as many as the group has, or none of its managers is
            called like its ``all2all_backend``.
    """

    def __init__(self, context: CommunicatorContext) -> None:
        super().__init__(context)
        end_at_exit(self)

    def synchronize(self, *, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Return when everything that this rank's calls have begun has succeeded. Returns at once if calls
        wait for the device themselves.

        Raises:
            TimeoutError, PeerGoneError: a call missed its deadline, or a rank has died; names it. All results
                since the last ``synchronize`` are invalid.
            The rest as the collectives.
        """
        with self._attempt(timeout) as deadline:
            self._synchronize(deadline)

    def suspend(self) -> None:
        """Release what ``resume`` can recreate: buffers of the device's library, while the engine sleeps.

        Every rank calls it, between two collectives. Until ``resume`` the others raise ``TransportError``.
        Idempotent.

        Raises:
            ClosedError, TransportError: as the law says.
            BusyError: a collective is under way in another thread.
        """
        if self._suspended and not self._destroyed:
            return
        with self._attempt(None):
            self._suspend()
            self._suspended = True

    def resume(self) -> None:
        """Recreate what ``suspend`` released; every rank calls it. Idempotent. Raises as ``suspend``."""
        if self._suspended and not self._destroyed:
            self._suspended = False
            with self._attempt(None):
                self._resume()
        self._check_usable()

    def destroy(self) -> None:
        """Leave: other ranks' calls that need this rank raise ``PeerGoneError``, and this rank's own calls
        raise ``ClosedError``, a blocked one too. The caller still owns the groups that it passed in.
        Idempotent, never waits.
        """
        if not self._destroyed:
            self._destroyed = True
            self._destroy()

    def _end_at_exit(self) -> None:
        self.destroy()

    def _is_in_use(self) -> bool:
        return self._busy.locked()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()
