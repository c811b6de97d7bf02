"""The main program of one worker of a tensor-parallel engine: ``python -m kvplug_transformers.engine.rank``.

It holds its part of the model, its part of the paged cache, and its worker side of the connector. Commands
come from the scheduler's process through a message queue; they are the methods ``_do_<op>`` of :class:`Rank`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from kvplug import (
    Config,
    PeerGoneError,
    Registry,
    StatelessGroup,
    build_communicator,
    build_connector,
    build_queue,
)
from kvplug.engine import Parallelism
from kvplug.transport import Pipe, QueueEndpoint
from kvplug_transformers.engine.step import Step
from kvplug_transformers.processes.parent_link import ParentLink, start_log

if TYPE_CHECKING:
    from kvplug_transformers.engine.worker import Worker

MAX_MESSAGE_BYTES = 1 << 20
"""The chunk size of the queues. A larger step is possible, but costs more."""


def on_one_host(config: Config) -> Config:
    """The config of the queue and the communicator between an engine's processes, which are on one host."""
    return attrs.evolve(config, host="unix:@kvplug")


class Rank:
    """Executes commands one after another, and answers each."""

    def __init__(self, parent: ParentLink, wrap_pipe: Callable[[Pipe], Pipe] | None = None) -> None:
        self._parent = parent
        self._wrap_pipe = wrap_pipe
        self._registry = Registry.from_env()
        self._workers: dict[int, Worker] = {}
        """Workers by the number of the engine: the demo has several engines over one model."""

    def run(self) -> int:
        """Run until the scheduler closes its queue, or a command fails. Returns the exit status."""
        # A failure is reported before the queues are closed, so that the scheduler knows the reason.
        with ExitStack() as self._stack:
            return self._parent.run(self._serve)

    def _serve(self) -> None:
        start = next(self._parent.commands())
        config = self._config = Config.from_dict(start["config"])
        rank, size = self._rank, self._size = start["rank"], start["size"]
        handle, registry = QueueEndpoint.Handle.from_plain(start["steps"]), self._registry
        inner = on_one_host(config)
        queues = build_queue(
            inner, registry=registry, local_reader_ranks=range(size), max_chunk_bytes=MAX_MESSAGE_BYTES
        )
        steps = self._stack.enter_context(queues.create_from_handle(handle, rank))
        answers = self._stack.enter_context(queues.create([0]))
        import torch

        from kvplug_transformers.model.facts import describe
        from kvplug_transformers.model.load import load
        from kvplug_transformers.model.shards import split

        torch.set_num_threads(start["threads"])
        self._model = load(Path(start["model"])).model
        self._facts = describe(self._model)
        group = self._stack.enter_context(
            StatelessGroup.create(
                start["group"], rank=rank, world_size=size, timeout=config.connect_timeout_s
            )
        )
        communicator = self._stack.enter_context(build_communicator(inner, group, registry=registry))
        split(self._model, rank, size, communicator.all_reduce, config.device)
        facts = attrs.asdict(self._facts)
        self._parent.send("loaded", facts=facts, answers=answers.export_handle().as_plain())
        while True:
            try:
                command = steps.dequeue(indefinite=True)
            except PeerGoneError:
                return  # the scheduler has closed the queue
            answers.enqueue(getattr(self, f"_do_{command.pop('op')}")(**command))

    def _do_open(
        self,
        engine: int,
        options: Mapping[str, Any],
        connects: bool,
        listen: str | None,
        connect: Mapping[int, str] | None,
    ) -> dict[str, Any]:
        """Make the pages of one more engine, and with ``connects`` its connector's worker side."""
        from kvplug_transformers.engine.options import EngineOptions, cache_config
        from kvplug_transformers.engine.worker import Worker

        rank, size = self._rank, self._size
        if listen is not None and not listen.endswith(":0"):  # with port 0, any port is good
            listen = Config.address_beside(listen, rank)
        cache = cache_config(self._facts, EngineOptions(**options), size)
        connector: Any = None
        if connects:
            connector = build_connector(
                self._config,
                "worker",
                model=self._facts.info,
                cache=cache,
                parallelism=Parallelism(
                    worker_rank=rank, num_workers=size, tensor_rank=rank, tensor_size=size
                ),
                registry=self._registry,
                wrap_pipe=self._wrap_pipe,
                listen=listen,
                connect=connect,
            )
            self._stack.callback(connector.shutdown)
        worker = self._workers[engine] = Worker(self._model, cache, connector, samples=rank == 0)
        return {"metadata": worker.get_handshake_metadata().get(0), "contacts": worker.contacts}

    def _do_ready(self, engine: int) -> dict[str, Any]:
        return self._workers[engine].wait_until_ready()

    def _do_step(self, engine: int, step: Mapping[str, Any]) -> dict[str, Any]:
        worker = self._workers[engine]
        sampled, output = worker.execute(Step.from_plain(step))
        events = worker.take_events()
        return {
            "sampled": sampled,
            "output": attrs.asdict(output, recurse=False),
            "events": [attrs.asdict(event, recurse=False) for event in events],
            "route": worker.last_route,
        }


def main(wrap_pipe: Callable[[Pipe], Pipe] | None = None) -> None:
    """``wrap_pipe`` wraps every pipe of the connector, to inject faults."""
    parent = ParentLink()
    start_log()
    os.environ["HF_HUB_OFFLINE"] = "1"
    status = Rank(parent, wrap_pipe).run()
    sys.stderr.flush()
    os._exit(status)  # everything is shut down; the interpreter's own shutdown only takes time


if __name__ == "__main__":
    main()
