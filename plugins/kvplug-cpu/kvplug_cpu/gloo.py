"""gloo with deadlines: a process group, kvplug's or the engine's, whose operations end in time."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch.distributed import AllreduceOptions, AllToAllOptions, BroadcastOptions

from kvplug import ClosedError, ConfigError, KvplugError, PluginError, TimeoutError, TransportError
from kvplug.transport import BackgroundThread, Deadline, ExitGuard, NamedExhaustion
from kvplug_cpu.store import GroupStore

_STEP_S = 0.05
"""How often a thread that waits for gloo checks whether the other ranks are alive."""
_BEYOND_S = 5.0
"""gloo's own timeout is this much later than ours: gloo restarts it at each step of an operation."""
_FOR_EVER = timedelta(days=365)
_NOBODYS_TAG = 0x6B76
_ENDING_S = 2.0
_THREADS = 3
"""Threads of a group."""
_DESCRIPTORS = 8
"""Descriptors of a group, and a reserve, besides one for each rank."""


class Gloo:
    """Operations on CPU tensors; each ends in its result, at its deadline, or when ``check`` raises.

    ``check`` is called periodically while an operation waits. After an error the group is unusable.
    """

    def __init__(self, group: Any, check: Callable[[], None], *, owned: bool) -> None:
        self.group: Any = group
        self._check = check
        self._owned = owned
        self._stuck = False
        self._inside = False
        """A thread is in an operation."""
        self._leaving = False
        ExitGuard.register(self)

    @classmethod
    def of(cls, group: Any, rank: int, world_size: int, check: Callable[[], None]) -> Gloo:
        """Use an existing torch process group, which the caller still owns.

        Raises ConfigError: it is not one, has other ranks, or no backend for CPU tensors.
        """
        try:
            there = (group.rank(), group.size())
            group._get_backend(torch.device("cpu"))
        except (AttributeError, RuntimeError) as e:
            raise ConfigError(
                f"a torch process group with gloo is needed as device_group, not {group!r}: {e}"
            ) from e
        if there != (rank, world_size):
            raise ConfigError(
                f"this is rank {rank} of {world_size}, and in the given process group it is"
                f" rank {there[0]} of {there[1]}"
            )
        return cls(group, check, owned=False)

    @classmethod
    def meet(
        cls,
        store: torch.distributed.Store,
        rank: int,
        world_size: int,
        address: str,
        deadline: Deadline,
        check: Callable[[], None],
    ) -> Gloo:
        """A group whose sockets are bound to ``address``, and whose ranks exchange addresses through
        ``store``.

        Raises:
            PluginError: this torch has no gloo.
            TransportError: gloo cannot use the address, or cannot connect; with its reason.
            TimeoutError: the deadline has passed.
            What ``store`` raises, which is used by another thread, and ``check``.
        """
        if not torch.distributed.is_gloo_available():
            raise PluginError("this torch was built without gloo, which the communicator 'cpu' works over")
        from torch.distributed import ProcessGroupGloo

        found: list[Any] = []
        given_up = threading.Event()

        def options() -> Any:
            made = ProcessGroupGloo._Options()
            made._timeout = _span(deadline, 0.0)
            made._devices = [ProcessGroupGloo.create_device(hostname=address)]
            return made

        def connect() -> None:
            try:
                # Not in a variable: errors of the store keep this frame, and the device has a thread and
                # sockets, which would stay until a garbage collection.
                found.append(ProcessGroupGloo(store, rank, world_size, options()))
            except BaseException as e:
                found.append(e)
            if given_up.is_set():
                found.clear()

        # gloo's timeout applies to each of its steps: only another thread can keep the deadline.
        what = f"gloo at {address}"
        # Another rank may be a thread of this process, and need as many now.
        NamedExhaustion.ensure_available(
            what, descriptors=2 * (_DESCRIPTORS + world_size), threads=2 * _THREADS
        )
        thread = BackgroundThread(connect, name="kvplug-cpu-gloo", stop=partial(_abandon, store))
        with NamedExhaustion(what):
            thread.start()
        try:
            while not found:
                left = deadline.remaining()
                thread.join(_STEP_S if left is None else min(_STEP_S, left))
                if not found:
                    check()
                    if deadline.expired:
                        raise TimeoutError("the ranks did not connect to each other through gloo in time")
        except BaseException:
            given_up.set()
            found.clear()
            raise
        thread.join()
        if isinstance(found[0], BaseException):
            with _mapped(f"gloo could not connect the ranks at {address}"):
                raise found[0]
        return cls(found[0], check, owned=True)

    def close(self) -> None:
        """Drop the group. An operation under way ends by itself, in the thread that waits for it."""
        last = [self.group]
        self.group = None
        if self._stuck:
            # The thread that drops the last reference to the group waits for operations under way.
            dropping = BackgroundThread(last.clear, name="kvplug-cpu-gloo", stop=lambda: None)
            with contextlib.suppress(RuntimeError):  # no thread: this one waits
                dropping.start()

    def after_fork_in_child(self) -> None:
        """In a forked child gloo's threads do not exist, and destroying the group would wait for them: keep
        it.
        """
        self._inside = False
        if self._owned and self.group is not None:
            _keep_for_ever(self.group)

    def _end_at_exit(self) -> None:
        self._leaving = True  # the thread in an operation looks often

    def _is_in_use(self) -> bool:
        return self._inside

    # -- operations ------------------------------------------------------------------------------
    #
    # Only these three operations: they use the given tensors directly. For gloo's others torch allocates a
    # temporary tensor and, on failure, frees it while gloo still uses it. gloo then reads freed memory, which
    # crashes the process.

    def all_reduce(self, tensor: torch.Tensor, deadline: Deadline) -> None:
        self._run("allreduce", [tensor], options=AllreduceOptions(), deadline=deadline)

    def broadcast(self, tensor: torch.Tensor, root: int, deadline: Deadline) -> None:
        options = BroadcastOptions()
        options.rootRank = root
        self._run("broadcast", [tensor], options=options, deadline=deadline)

    def all_to_all(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: list[int],
        sizes: list[int],
        deadline: Deadline,
    ) -> None:
        """``sizes[r]`` elements of ``tensor`` to rank r, ``output_sizes[r]`` from it."""
        given = (output, tensor, output_sizes, sizes)
        self._run("alltoall_base", *given, options=AllToAllOptions(), deadline=deadline)

    def _run(self, operation: str, *given: Any, options: Any, deadline: Deadline) -> None:
        """Raises TransportError: gloo failed. TimeoutError, and the errors of ``check``: it was stopped."""
        options.timeout = _span(deadline, _BEYOND_S)
        group = self.group
        work = None
        self._inside = True
        try:
            with _mapped("gloo"):
                work = getattr(group, operation)(*given, options)
                while not self.has_ended(work, Deadline.after(min(_STEP_S, _left(deadline)))):
                    if self._leaving:
                        raise ClosedError("the program leaves")
                    self._check()
                    if deadline.expired:
                        raise TimeoutError("a collective did not complete in time")
        except BaseException:
            if work is not None and not work.is_completed():
                if self._leaving:
                    _keep_for_ever(group)
                else:
                    self._stop(group, work)
            raise
        finally:
            self._inside = False
            del group, work  # an error's traceback keeps locals alive, and these have threads and sockets

    def has_ended(self, work: Any, deadline: Deadline) -> bool:
        """Raises RuntimeError: it has ended in an error, whose traceback does not keep it."""
        try:
            work.wait(timedelta(seconds=max(0.001, _left(deadline))))
        except RuntimeError:
            if not work.is_completed():
                return False
            try:
                work.wait(timedelta(seconds=0.001))  # it may have ended well just now
            finally:
                del work
        return True

    def _stop(self, group: Any, work: Any) -> None:
        """End operations under way. gloo has no abort, but a receive that times out closes all connections of
        its group, and every operation on them ends.
        """
        other = (group.rank() + 1) % group.size()
        nothing = [torch.empty(1, dtype=torch.uint8)]
        with contextlib.suppress(RuntimeError):
            group.recv(nothing, other, _NOBODYS_TAG).wait(timedelta(milliseconds=1))
        with contextlib.suppress(RuntimeError):
            self._stuck = not self.has_ended(work, Deadline.after(_ENDING_S))


def _abandon(store: torch.distributed.Store) -> None:
    if isinstance(store, GroupStore):  # others do not wait for long
        store.abandon()


def _keep_for_ever(thing: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


@contextlib.contextmanager
def _mapped(what: str) -> Iterator[None]:
    """Map torch's errors. Errors of kvplug's store pass through gloo unchanged."""
    try:
        yield
    except MemoryError as e:
        raise TransportError(f"{what}: no memory") from e
    except RuntimeError as e:
        if isinstance(e, KvplugError):
            raise
        NamedExhaustion.check(e, what)
        reason = str(e).partition("] ")[2] or str(e)
        raise TransportError(f"{what}: {reason.partition('. This is')[0].strip()}") from e


def _left(deadline: Deadline) -> float:
    left = deadline.remaining()
    return _FOR_EVER.total_seconds() if left is None else left


def _span(deadline: Deadline, beyond_s: float) -> timedelta:
    left = deadline.remaining()
    return _FOR_EVER if left is None else timedelta(seconds=max(0.001, left + beyond_s))
