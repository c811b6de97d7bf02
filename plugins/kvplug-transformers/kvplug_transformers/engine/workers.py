"""The scheduler's end of a tensor-parallel engine: worker processes that share one model."""

from __future__ import annotations

import itertools
import os
import queue
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from kvplug import ClosedError, Config, KvplugError, PeerGoneError, TimeoutError, build_queue
from kvplug.engine import (
    CacheEvent,
    ModelInfo,
    Plain,
    WorkerOutput,
)
from kvplug.transport import DEFAULT_TIMEOUT, Deadline, MessageQueue, QueueEndpoint, Timeout
from kvplug_transformers.engine.options import EngineOptions
from kvplug_transformers.engine.rank import MAX_MESSAGE_BYTES, on_one_host
from kvplug_transformers.engine.reports import Reports
from kvplug_transformers.engine.step import Step
from kvplug_transformers.model.facts import ModelFacts
from kvplug_transformers.processes.child import Child, Event, describe_exit, end_all

RANK_COMMAND = (sys.executable, "-P", "-m", "kvplug_transformers.engine.rank")

_VERDICT_S = 1.0
"""How long to look for the worker at fault, once another one has failed because of it."""
_READY_S = 5.0
"""How much longer to wait for peers than the workers, whose errors have more details."""
_OF_OTHERS = ("PeerGoneError", "TimeoutError", "TransportError")
"""Errors of a worker whose cause may be another worker."""


class RankError(KvplugError):
    """A worker process has failed. The message has its rank, its pid, and its own error."""


class Workers:
    """Processes that each hold a part of one model, and compute steps together.

    The scheduler sends each command to all of them through the config's ``queue``. They add up their results
    with its ``communicator``, and each answers through its own queue. Start them from the main thread only:
    on Linux they are killed when the *thread* that started them ends.

    When a worker fails, is killed or does not answer in time, every process is ended, and the call raises:

    - ``PeerGoneError``: a process has ended;
    - ``TimeoutError``: a process is stopped, or too slow for the config's ``timeout_s``;
    - ``RankError``: a process reported an error.

    Each names the worker by rank and pid. Later calls raise ``ClosedError``.
    """

    def __init__(
        self,
        model: Path,
        config: Config,
        size: int,
        *,
        threads: int = 1,
        command: Sequence[str] = RANK_COMMAND,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> None:
        """Start ``size`` workers, and wait until each has loaded its part of the model.

        Args:
            model: the Hugging Face folder.
            threads: of each worker.
            command: the command line of a worker.
            timeout: for the whole start; the config's ``connect_timeout_s`` by default.

        Raises:
            The errors of the class. ConfigError, PluginError: the config's queue cannot be built.
        """
        self.size = size
        self.config = config
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._children: dict[str, Child] = {}
        """Processes by the name in their events, in the order of ranks."""
        self._last_events: dict[tuple[str, str], dict[str, Any]] = {}
        """The last event of each worker and kind."""
        self._answers: list[MessageQueue] = []
        self._numbers = itertools.count()
        self._closed = False
        local = range(size)
        endpoint = build_queue(
            on_one_host(config), local_reader_ranks=local, max_chunk_bytes=MAX_MESSAGE_BYTES
        )
        self._steps = endpoint.create(local)
        deadline = Deadline.after(timeout, config.connect_timeout_s)
        try:
            arguments = {
                "model": str(model),
                "config": _plain(config),
                "size": size,
                "threads": threads,
                "group": f"unix:@kvplug-workers-{os.getpid()}-{secrets.token_hex(4)}",
                "steps": self._steps.export_handle().as_plain(),
            }
            for rank in local:
                child = Child(f"worker {rank}", command, self._events)
                self._children[child.name] = child
                child.send("start", rank=rank, **arguments)
            loaded = self._wait_until_loaded(deadline)
            for event in loaded:
                handle = QueueEndpoint.Handle.from_plain(event["answers"])
                self._answers.append(endpoint.create_from_handle(handle, 0))
        except BaseException:
            self.close(at_once=True)
            raise
        facts = loaded[0]["facts"]
        self.facts = ModelFacts(
            info=ModelInfo(**facts["info"]),
            context=facts["context"],
            layer_names=tuple(facts["layer_names"]),
        )
        """The whole model's."""

    @property
    def pids(self) -> tuple[int, ...]:
        """The workers' process ids, by rank."""
        return tuple(child.pid for child in self._children.values())

    def open(
        self,
        options: EngineOptions,
        *,
        connects: bool = False,
        listen: str | None = None,
        connect: Mapping[int, str] | None = None,
    ) -> ShardedWorker:
        """Make the pages of one engine at every worker.

        Args:
            connects: whether each worker has its worker side of the config's connector.
            listen: the address of worker 0, instead of the config's.
            connect: contacts of the peer engine's workers, by rank, instead of the config's.

        Raises:
            The errors of the class.
        """
        number = next(self._numbers)
        answers = self.ask(
            "open",
            engine=number,
            options=attrs.asdict(options),
            connects=connects,
            listen=listen,
            connect=connect,
        )
        return ShardedWorker(self, number, answers, connects=connects)

    def ask(self, op: str, timeout: Timeout = DEFAULT_TIMEOUT, **arguments: Any) -> list[dict[str, Any]]:
        """Send one command to every worker; returns their answers in the order of ranks.

        Raises:
            The errors of the class.
        """
        if self._closed:
            raise ClosedError("the workers of this engine have ended")
        deadline = Deadline.after(timeout, self.config.timeout_s)
        waiting_for = 0
        try:
            self._steps.enqueue({"op": op, **arguments}, deadline.remaining())
            answers = []
            for waiting_for, end in enumerate(self._answers):  # noqa: B007 - named in the error
                answers.append(end.dequeue(deadline.remaining()))
            return answers
        except (PeerGoneError, TimeoutError) as e:
            error = self._fault() or TimeoutError(
                f"{self._name(f'worker {waiting_for}')} has not finished {op!r} in time ({e}); on a slow"
                " machine, or for a large model, raise timeout_s"
            )
            self.close(at_once=True)
            raise error from e

    def _wait_until_loaded(self, deadline: Deadline) -> list[dict[str, Any]]:
        wanted = [(name, "loaded") for name in self._children]
        while not all(key in self._last_events for key in wanted):
            self._take_events(deadline)
            if any(kind == "exit" for _, kind in self._last_events):
                raise self._fault() or AssertionError("a worker has ended")
            if deadline.expired:
                late = ", ".join(self._name(key[0]) for key in wanted if key not in self._last_events)
                raise self._fault() or TimeoutError(
                    f"{late} did not load the model in time; on a slow machine, or for a large model, raise"
                    " connect_timeout_s"
                )
        return [self._last_events[key] for key in wanted]

    def _take_events(self, deadline: Deadline) -> None:
        """Record the events that have arrived; waits for the first one."""
        try:
            name, event = self._events.get(timeout=deadline.remaining())
            while True:
                self._last_events[name, event["event"]] = event
                name, event = self._events.get_nowait()
        except queue.Empty:
            return

    def _fault(self) -> KvplugError | None:
        """The error of the worker at fault; ``None`` if all workers seem well.

        A worker that ended without an error comes first, then a stopped one, then one that reported an error.
        """
        deadline = Deadline.after(_VERDICT_S)
        while True:
            errors = {name: event for (name, kind), event in self._last_events.items() if kind == "error"}
            for (name, kind), event in self._last_events.items():
                if kind == "exit" and name not in errors:
                    words = self._children[name].last_output if event["code"] >= 0 else ""
                    why = describe_exit(event["code"]) + (f":\n{words}" if words else "")
                    return PeerGoneError(f"{self._name(name)} {why}")
            for name, child in self._children.items():
                if child.is_stopped:
                    return TimeoutError(f"{self._name(name)} is stopped (SIGCONT resumes it)")
            own = {name for name, error in errors.items() if error["kind"] not in _OF_OTHERS}
            if own or deadline.expired:
                break
            self._take_events(deadline)
        for name in (name for name in self._children if name in (own or errors)):
            return RankError(f"{self._name(name)} failed: {errors[name]['text']}")
        return None

    def _name(self, name: str) -> str:
        return f"{name} of {self.size} (pid {self._children[name].pid})"

    def close(self, *, at_once: bool = False) -> None:
        """End all processes and wait for them. ``at_once`` kills them; otherwise their connectors shut down.

        Idempotent.
        """
        if self._closed:
            return
        self._closed = True
        if at_once:
            self._steps.abort()
        else:
            self._steps.close()
        end_all(self._children.values(), at_once=at_once)
        for answers in self._answers:
            answers.abort()


class ShardedWorker:
    """All workers' parts of one engine. An engine uses it like a ``Worker`` in its own process."""

    def __init__(
        self, workers: Workers, number: int, opened: Sequence[Mapping[str, Any]], *, connects: bool
    ) -> None:
        self._workers = workers
        self._number = number
        self._metadata = {rank: answer["metadata"] for rank, answer in enumerate(opened)}
        self._reports = Reports(workers.size)
        self._events: list[CacheEvent] = []
        self.facts = workers.facts
        self.connects = connects
        """Whether each worker has its side of a connector."""
        self.contacts = tuple(contact for answer in opened for contact in answer["contacts"])
        """The addresses of the workers' connectors, by rank. They may contain tokens: do not log them."""
        self.last_route = ""
        """As ``Worker.last_route``, at rank 0."""

    def get_handshake_metadata(self) -> Mapping[int, Plain]:
        """Each connector's handshake metadata, by rank."""
        return {rank: metadata for rank, metadata in self._metadata.items() if metadata is not None}

    def wait_until_ready(self) -> dict[str, Any]:
        """As ``Worker.wait_until_ready``, at rank 0; all workers are ready. Raises as :class:`Workers`."""
        timeout_s = self._workers.config.connect_timeout_s + _READY_S
        return self._workers.ask("ready", timeout_s, engine=self._number)[0]

    def execute(self, step: Step) -> tuple[dict[str, int], WorkerOutput]:
        """Run one step; returns the tokens that rank 0 sampled, and the merged reports of all connectors.

        Raises:
            As :class:`Workers`.
        """
        answers = self._workers.ask("step", engine=self._number, step=step.to_plain())
        first, *others = [[CacheEvent(**fields) for fields in answer["events"]] for answer in answers]
        self._events += [event for event in first if all(event in each for each in others)]
        self.last_route = answers[0]["route"]
        output = self._reports.merge([WorkerOutput(**answer["output"]) for answer in answers])
        return answers[0]["sampled"], output

    def take_events(self) -> list[CacheEvent]:
        """Cache events since the last call that every worker reported: each holds a part of a block."""
        events, self._events = self._events, []
        return events


def _plain(config: Config) -> dict[str, Any]:
    """Every value of a config, for ``Config.from_dict`` in another process. The secret is not in a config."""
    values = attrs.asdict(config, recurse=False, filter=attrs.filters.exclude("sources", "source"))
    values["options"] = {name: dict(table) for name, table in config.options.items()}
    return {name: value for name, value in values.items() if value is not None}
