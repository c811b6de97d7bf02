"""The CPUs that kvplug's threads run on.

A new thread inherits the affinity of the thread that starts it. Engines bind their main threads: OpenMP binds
the thread that loads it to the first of its CPUs, where vLLM's worker then spins. All of kvplug's threads
would share that one CPU with it. So each of them sets its own affinity when it starts (:func:`set_own_cpus`),
to the CPUs that the config's key ``thread_cpus`` names.

The default, "all", is what the operator gave to the program, as far as that can be known:

- the affinities of all threads that the process has, the one that it had when this module was imported, and
  the CPUs to which OpenMP binds threads: what an engine has bound is a part of them;
- where :mod:`multiprocessing` started this process, those of the process that asked for it. vLLM starts its
  workers with variables that make OpenMP bind them before any of their code runs, so that a worker itself has
  no trace of its CPUs.

A program that was restricted from outside (taskset, numactl, Slurm, systemd) stays within that: an affinity
is never taken from a parent that is another program, nor from the list of all CPUs. A container's cpuset
restricts every thread anyway.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any, Final

from kvplug.errors import ConfigError
from kvplug.net import openmp

_log = logging.getLogger(__name__)

_ONLINE: Final = "/sys/devices/system/cpu/online"
_TASKS: Final = "/proc/{}/task"
_IS_KNOWN: Final = hasattr(os, "sched_setaffinity")

Cpus = frozenset[int]


def _of_thread(thread_id: int) -> Cpus:
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        return frozenset(os.sched_getaffinity(thread_id))
    return frozenset()


_AT_IMPORT: Final = _of_thread(0) if _IS_KNOWN else frozenset[int]()


def cpus_of(pid: int | str) -> Cpus:
    """All CPUs that any thread of a process may use; empty where that is not known."""
    with contextlib.suppress(OSError):  # no /proc, or the process has ended
        threads = os.listdir(_TASKS.format(pid))
        return frozenset[int]().union(*(_of_thread(int(thread)) for thread in threads))
    return frozenset()


@functools.cache
def all_cpus() -> Cpus:
    """What "all" means; see the module. Asked once: an engine may bind more of its threads later."""
    found = _AT_IMPORT | cpus_of("self") | openmp.places()
    # A process that multiprocessing has started has imported this.
    module: Any = sys.modules.get("multiprocessing.process")
    starter = module and module.parent_process()
    with contextlib.suppress(OSError, ValueError):  # the program has closed descriptors of others
        if starter is not None and starter.is_alive():
            found |= cpus_of(starter.pid)
    return found


def format_cpus(cpus: Cpus) -> str:
    """``{0, 1, 2, 8}`` as ``"0-2,8"``."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def parse_cpus(text: str) -> Cpus:
    """``"0-3,8"`` as a set."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def missing_cpus(wanted: str) -> str | None:
    """The fault of a config's ``thread_cpus`` that lists CPUs which this host does not have."""
    try:
        with open(_ONLINE, encoding="ascii") as file:
            online = parse_cpus(file.read().strip())
    except (OSError, ValueError):
        return None  # another system, or one that does not say
    missing = frozenset[int]() if wanted in ("all", "inherit") else parse_cpus(wanted) - online
    if not missing:
        return None
    has = format_cpus(online)
    return f"thread_cpus: {wanted!r} was given, and this host has {has}: there is no {format_cpus(missing)}"


_chosen: Cpus | None = None
"""``None``: all, which are asked for when the first thread starts."""


def choose_cpus(wanted: str) -> None:
    """Threads of kvplug that this process starts from now on use these CPUs.

    Args:
        wanted: ``"inherit"`` (those of the thread that starts it), or a list as ``"0-3,8"``. ``"all"``, the
            default of a config, leaves what another config of this process has chosen.

    Raises:
        ConfigError: this process may use none of the listed CPUs, or this system cannot bind threads.
    """
    global _chosen
    if wanted == "all":
        return
    chosen = frozenset[int]() if wanted == "inherit" else parse_cpus(wanted)
    if chosen:
        if not _IS_KNOWN:
            raise ConfigError(f"thread_cpus: {wanted!r} was given, and this system binds no threads to CPUs")
        try:
            with _own_cpus_again():
                os.sched_setaffinity(0, chosen)
        except OSError as e:
            raise ConfigError(
                f"thread_cpus: {wanted!r} was given, and this process may use none of these CPUs; it may use"
                f" {format_cpus(all_cpus())}"
            ) from e
    _chosen = chosen


def set_own_cpus() -> None:
    """The calling thread, which is one of kvplug's and starts, uses the CPUs that were chosen."""
    if cpus := _wanted():
        openmp.share_no_loops()
        _bind(cpus)


def _wanted() -> Cpus:
    """Empty: those that a thread has inherited."""
    if not _IS_KNOWN:
        return frozenset()
    return all_cpus() if _chosen is None else _chosen


def _bind(cpus: Cpus) -> None:
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as e:  # a container's CPUs have changed
        _log.debug("a thread keeps the CPUs of the thread that started it: %s", e)


@contextlib.contextmanager
def thread_cpus() -> Iterator[None]:
    """Threads that a library starts itself while the block runs use the CPUs of kvplug's threads.

    They inherit them from the calling thread, which has its own ones again afterwards.
    """
    with _own_cpus_again():
        if cpus := _wanted():
            _bind(cpus)
        yield


@contextlib.contextmanager
def _own_cpus_again() -> Iterator[None]:
    before = _of_thread(0) if _IS_KNOWN else frozenset[int]()
    try:
        yield
    finally:
        if before:
            _bind(before)
