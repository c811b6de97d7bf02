"""The scheduler's end of a tensor-parallel engine: worker processes that share one model."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from kvplug import ClosedError, Config, PeerGoneError, TimeoutError, build_queue
from kvplug.engine import CacheEvent, WorkerOutput
from kvplug.net.wire import from_plain
from kvplug.transport import DEFAULT_TIMEOUT, Deadline, MessageQueue, QueueEndpoint, Timeout
from kvplug_transformers.engine.options import EngineOptions
from kvplug_transformers.engine.rank import MAX_MESSAGE_BYTES, config_to_plain, on_one_host
from kvplug_transformers.engine.reports import Reports
from kvplug_transformers.engine.step import Step
from kvplug_transformers.model.facts import ModelFacts
from kvplug_transformers.processes import Processes, command_of

RANK_COMMAND = command_of("kvplug_transformers.engine.rank")

_READY_S = 5.0
"""How much longer to wait for peers than the workers, whose errors have more details."""


class Workers:
    """Processes that each hold a part of one model, and compute steps together.

    The scheduler sends each command to all of them through the config's ``queue``. They add up their results
    with its ``communicator``, and each answers through its own queue. Start them from the main thread only:
    on Linux they are killed when the *thread* that started them ends.

    When a worker fails, is killed or does not answer in time, every process is ended, and the call raises:

    - ``PeerGoneError``: a process has ended;
    - ``TimeoutError``: a process is stopped, or too slow for the config's ``timeout_s``;
    - ``ProcessError``: a process reported an error.

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
        timeout: float | None = None,
    ) -> None:
        """Start ``size`` workers, and wait until each has loaded its part of the model.

        Args:
            model: the Hugging Face folder.
            threads: of each worker.
            command: the command line of a worker.
            timeout: for loading the model; the config's ``connect_timeout_s`` by default.

        Raises:
            The errors of the class. ConfigError, PluginError: the config's queue cannot be built.
        """
        self.size = size
        self.config = config
        self._numbers = itertools.count()
        self._answers: list[MessageQueue] = []
        self._processes = Processes(
            patience_s=config.connect_timeout_s if timeout is None else timeout,
            advice="raise connect_timeout_s",
        )
        names = [f"worker {rank} of {size}" for rank in range(size)]
        endpoint = build_queue(
            on_one_host(config), local_reader_ranks=range(size), max_chunk_bytes=MAX_MESSAGE_BYTES
        )
        self._steps = endpoint.create(range(size))
        try:
            for name in names:
                self._processes.start(name, command)
            group = f"unix:@kvplug-workers-{os.getpid()}-{secrets.token_hex(4)}"
            for rank, name in enumerate(names):
                self._processes.send(
                    name,
                    "start",
                    model=str(model),
                    config=config_to_plain(config),
                    rank=rank,
                    size=size,
                    threads=threads,
                    group=group,
                    steps=self._steps.export_handle().as_plain(),
                )
            loaded = self._processes.answers(*names)
            for answer in loaded:
                handle = QueueEndpoint.Handle.from_plain(answer["answers"])
                self._answers.append(endpoint.create_from_handle(handle, 0))
        except BaseException:
            self.close(at_once=True)
            raise
        self.facts = from_plain(loaded[0]["facts"], ModelFacts, "facts")
        """The whole model's."""
        self.pids = self._processes.pids
        """The workers' process ids, by rank."""

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
        return ShardedWorker(self, number, answers)

    def ask(self, op: str, timeout: Timeout = DEFAULT_TIMEOUT, **arguments: Any) -> list[dict[str, Any]]:
        """Send one command to every worker; returns their answers in the order of ranks.

        Raises:
            The errors of the class.
        """
        if not self._answers:
            raise ClosedError("the workers of this engine have ended")
        deadline = Deadline.after(timeout, self.config.timeout_s)
        rank = 0
        try:
            self._steps.enqueue({"op": op, **arguments}, deadline.remaining())
            answers = []
            for rank, queue in enumerate(self._answers):  # noqa: B007 - named in the error
                answers.append(queue.dequeue(deadline.remaining()))
            return answers
        except (PeerGoneError, TimeoutError) as e:
            error = self._processes.fault() or TimeoutError(
                f"worker {rank} of {self.size} (pid {self.pids[rank]}) has not finished {op!r} in time ({e});"
                " on a slow machine, or for a large model, raise timeout_s"
            )
            self.close(at_once=True)
            raise error from e

    def check(self) -> None:
        """Raise the error of a worker that has ended; costs little. Raises as the class."""
        if self._processes.has_ended():
            error = self._processes.fault()
            self.close(at_once=True)
            raise error or ClosedError("the workers of this engine have ended")

    def close(self, *, at_once: bool = False) -> None:
        """End all processes and wait for them. ``at_once`` kills them; otherwise their connectors shut down.

        Idempotent.
        """
        answers, self._answers = self._answers, []
        if at_once:
            self._steps.abort()
        else:
            self._steps.close()
        self._processes.close(at_once=at_once)
        for queue in answers:
            queue.abort()


class ShardedWorker:
    """All workers' parts of one engine. An engine uses it like a ``Worker`` in its own process."""

    def __init__(self, workers: Workers, number: int, opened: Sequence[Mapping[str, Any]]) -> None:
        self._workers = workers
        self._number = number
        self._reports = Reports(workers.size)
        self.facts = workers.facts
        self.contacts = tuple(contact for answer in opened for contact in answer["contacts"])
        """The addresses of the workers' connectors, by rank. They may contain tokens: do not log them."""
        self.handshake_metadata = {
            rank: answer["metadata"] for rank, answer in enumerate(opened) if answer["metadata"] is not None
        }
        """Each connector's handshake metadata, by rank."""
        self.last_route = ""
        """As ``Worker.last_route``, at rank 0."""

    def shutdown(self) -> None:
        """Nothing: ``Workers.close`` shuts the connectors down."""

    def wait_until_ready(self) -> dict[str, Any]:
        """As ``Worker.wait_until_ready``, at rank 0; all workers are ready. Raises as :class:`Workers`."""
        timeout_s = self._workers.config.connect_timeout_s + _READY_S
        return self._workers.ask("ready", timeout_s, engine=self._number)[0]

    def execute(self, step: Step) -> tuple[dict[str, int], WorkerOutput, Iterable[CacheEvent]]:
        """Run one step; returns the tokens that rank 0 sampled, the merged reports of all connectors, and the
        events that every worker reported, since each holds a part of a block.

        Raises:
            As :class:`Workers`.
        """
        answers = self._workers.ask("step", engine=self._number, step=step.to_plain())
        first, *others = [[CacheEvent(**fields) for fields in answer["events"]] for answer in answers]
        events = [event for event in first if all(event in each for each in others)]
        self.last_route = answers[0]["route"]
        output = self._reports.merge([WorkerOutput(**answer["output"]) for answer in answers])
        return answers[0]["sampled"], output, events
