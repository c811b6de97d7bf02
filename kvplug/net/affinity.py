"""The CPUs that kvplug's threads run on.

A new thread inherits the affinity of the thread that starts it. The main thread of an engine's worker is
often bound to one CPU: OpenMP binds the thread that loads it to the first of its CPUs. vLLM's worker then
spins on that CPU, and all threads of kvplug would share it. So each kvplug thread, when it starts, sets its
own affinity (:func:`set_own_cpus`) to the CPUs that the config's key ``thread_cpus`` names.

The default, "all", means the CPUs that the operator gave to the program, as far as kvplug can find out:

- the affinities of all threads of the process, the process's affinity when this module was imported, and the
  CPUs to which OpenMP binds threads. They include every CPU to which an engine has bound a thread;
- if :mod:`multiprocessing` started this process, the CPUs of its parent process. vLLM starts its workers with
  variables that make OpenMP bind them before any of their code runs, so a worker cannot find out its CPUs by
  itself.

A program that was restricted from outside (taskset, numactl, Slurm, systemd) stays within its restriction:
kvplug does not use the affinity of a parent that is another program, or the list of all CPUs. A
container's cpuset restricts every thread anyway.

Where OpenMP binds threads to CPUs (``GOMP_CPU_AFFINITY``, ``OMP_PROC_BIND``, ...), it binds a thread when
that thread first runs a parallel loop, as torch does for a large copy. GNU's library binds the thread to its
own first place, the CPU of the engine's main thread, whatever affinity the thread had set. So kvplug's
threads run no parallel loops there; they only copy.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, Final

from kvplug.errors import ConfigError

_log = logging.getLogger(__name__)

_ONLINE: Final = "/sys/devices/system/cpu/online"
_TASKS: Final = "/proc/{}/task"

Cpus = frozenset[int]


def _of_thread(thread_id: int) -> Cpus:
    with contextlib.suppress(OSError):  # the thread has ended, or belongs to another user
        return frozenset(os.sched_getaffinity(thread_id))
    return frozenset()


_AT_IMPORT: Final = _of_thread(0)


def cpus_of(pid: int | str) -> Cpus:
    """Return all CPUs that any thread of a process may use; empty if unknown."""
    with contextlib.suppress(OSError):  # no /proc, or the process has ended
        threads = os.listdir(_TASKS.format(pid))
        return frozenset[int]().union(*(_of_thread(int(thread)) for thread in threads))
    return frozenset()


@functools.cache
def all_cpus() -> Cpus:
    """Return the CPUs that "all" means; see the module's docstring. Cached, since an engine may later bind
    threads to fewer CPUs."""
    found = _AT_IMPORT | cpus_of("self") | _places()
    # Every process that multiprocessing starts imports multiprocessing.process.
    module: Any = sys.modules.get("multiprocessing.process")
    starter = module and module.parent_process()
    with contextlib.suppress(OSError, ValueError):  # the program has closed descriptors that it does not own
        if starter is not None and starter.is_alive():
            found |= cpus_of(starter.pid)
    return found


def format_cpus(cpus: Cpus) -> str:
    """Return ``{0, 1, 2, 8}`` as ``"0-2,8"``."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def parse_cpus(text: str) -> Cpus:
    """Return ``"0-3,8"`` as a set."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def missing_cpus(wanted: str) -> str | None:
    """Return an error text if a config's ``thread_cpus`` lists CPUs that this host does not have, else
    ``None``."""
    try:
        with open(_ONLINE, encoding="ascii") as file:
            online = parse_cpus(file.read().strip())
    except (OSError, ValueError):
        return None  # another system, or the file is unavailable
    missing = frozenset[int]() if wanted in ("all", "inherit") else parse_cpus(wanted) - online
    if not missing:
        return None
    has = format_cpus(online)
    return f"thread_cpus: {wanted!r} was given, but this host has {has}, without {format_cpus(missing)}"


_chosen: Cpus | None = None
"""``None``: all, computed when the first thread starts."""


def choose_cpus(wanted: str) -> None:
    """Set the CPUs of the kvplug threads that this process starts from now on.

    Args:
        wanted: ``"inherit"`` (the CPUs of the thread that starts the new one), or a list such as ``"0-3,8"``.
            ``"all"``, the default of a config, keeps the choice of another config of this process.

    Raises:
        ConfigError: this process may use none of the listed CPUs.
    """
    global _chosen
    if wanted == "all":
        return
    chosen = frozenset[int]() if wanted == "inherit" else parse_cpus(wanted)
    if chosen:
        try:
            with _own_cpus_again():
                os.sched_setaffinity(0, chosen)
        except OSError as e:
            raise ConfigError(
                f"thread_cpus: {wanted!r} was given, but this process may use none of these CPUs; it may use"
                f" {format_cpus(all_cpus())}"
            ) from e
    _chosen = chosen


def set_own_cpus() -> None:
    """Bind the calling thread, a new thread of kvplug, to the chosen CPUs."""
    if cpus := _wanted():
        _share_no_loops()
        _bind(cpus)


def _wanted() -> Cpus:
    """Return the chosen CPUs; empty if the thread keeps the inherited ones."""
    return all_cpus() if _chosen is None else _chosen


def _bind(cpus: Cpus) -> None:
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as e:  # the container's CPUs have changed
        _log.debug("a thread keeps the CPUs of the thread that started it: %s", e)


@contextlib.contextmanager
def _own_cpus_again() -> Iterator[None]:
    before = _of_thread(0)
    try:
        yield
    finally:
        if before:
            _bind(before)


# -- OpenMP ----------------------------------------------------------------------------------------

_LIBRARY = re.compile(r"/\S*/lib(?:gomp|iomp5|omp)\b[^/\s]*\.so[^/\s]*$", re.MULTILINE)
"""Matches GNU's, Intel's and LLVM's OpenMP libraries in the list of mapped files."""


def _share_no_loops() -> None:
    """Turn off parallel loops in the calling thread if OpenMP binds threads. Call this before setting the
    affinity."""
    libraries = _loaded()
    if not libraries:
        return
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "get_num_threads"):
        torch.get_num_threads()  # first: a thread's first query makes torch reset its thread count
    for library in libraries:
        library.omp_set_num_threads(1)


def _places() -> frozenset[int]:
    """Return the CPUs to which OpenMP binds threads; empty if it binds none.

    They are among the CPUs that the process had at its start, before OpenMP bound the main thread.
    """
    libraries = _loaded()
    if not libraries:
        return frozenset()
    import ctypes  # imported only when needed: everything that starts a thread imports this module

    found: set[int] = set()
    for library in libraries:
        for place in range(library.omp_get_num_places()):
            cpus = (ctypes.c_int * library.omp_get_place_num_procs(place))()
            library.omp_get_place_proc_ids(place, cpus)
            found.update(cpus)
    return frozenset(found)


def _loaded() -> list[Any]:
    """Return the loaded OpenMP libraries that bind threads. torch ships one."""
    return _search(with_torch="torch" in sys.modules)


@functools.cache
def _search(*, with_torch: bool) -> list[Any]:
    """Search once before torch is imported and once after; see :func:`_loaded`."""
    found = []
    with contextlib.suppress(OSError):
        with open("/proc/self/maps") as maps:
            paths = sorted(set(_LIBRARY.findall(maps.read())))
        if paths:
            import ctypes
        for path in paths:
            with contextlib.suppress(OSError):  # its file has been removed
                library = ctypes.CDLL(path)
                if hasattr(library, "omp_get_place_proc_ids") and library.omp_get_proc_bind():
                    found.append(library)
    return found
