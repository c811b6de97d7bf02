"""The main program of one worker of a tensor-parallel engine: ``python -m kvplug_transformers.engine.rank``.

It holds its part of the model, its part of the paged cache, and its worker side of the connector. Commands
come from the scheduler's process through a message queue; they are the methods ``_do_<op>`` of :class:`Rank`.
"""

from __future__ import annotations

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
    build_queue,
)
from kvplug.transport import Pipe, QueueEndpoint
from kvplug_transformers.engine.step import Step
from kvplug_transformers.processes import Parent

if TYPE_CHECKING:
    from kvplug_transformers.engine.worker import Worker

WrapPipe = Callable[[Pipe], Pipe]

MAX_MESSAGE_BYTES = 1 << 20
"""The chunk size of the queues. A larger step is possible, but costs more."""


def on_one_host(config: Config) -> Config:
    """The config of the queue and the communicator between an engine's processes, which are on one host."""
    return attrs.evolve(config, host="unix:@kvplug")


def config_to_plain(config: Config) -> dict[str, Any]:
    """Every value of a config, for ``Config.from_dict`` in another process. The secret is not in a config."""
    values = attrs.asdict(config, recurse=False, filter=attrs.filters.exclude("sources", "source"))
    values["options"] = {name: dict(table) for name, table in config.options.items()}
    return {name: value for name, value in values.items() if value is not None}


class Rank:
    """Executes commands one after another, and answers each."""

    def __init__(self, parent: Parent, wrap_pipe: WrapPipe | None = None) -> None:
        self._parent = parent
        self._wrap_pipe = wrap_pipe
        self._workers: dict[int, Worker] = {}
        """Workers by the number of the engine: the demo has several engines over one model."""

    def serve(self, stack: ExitStack) -> None:
        """Load this worker's part of the model, and execute commands until the scheduler closes its queue."""
        start = next(self._parent.commands())
        self._stack = stack
        config = self._config = Config.from_dict(start["config"])
        rank, size = self._rank, self._size = start["rank"], start["size"]
        inner, registry = on_one_host(config), Registry.from_env()
        queues = build_queue(
            inner, registry=registry, local_reader_ranks=range(size), max_chunk_bytes=MAX_MESSAGE_BYTES
        )
        steps = stack.enter_context(
            queues.create_from_handle(QueueEndpoint.Handle.from_plain(start["steps"]), rank)
        )
        answers = stack.enter_context(queues.create([0]))
        import torch

        from kvplug_transformers.model.facts import describe
        from kvplug_transformers.model.load import load
        from kvplug_transformers.model.shards import split

        torch.set_num_threads(start["threads"])
        self._model = load(Path(start["model"])).model
        self._facts = describe(self._model)
        group = stack.enter_context(
            StatelessGroup.create(
                start["group"], rank=rank, world_size=size, timeout=config.connect_timeout_s
            )
        )
        communicator = stack.enter_context(build_communicator(inner, group, registry=registry))
        split(self._model, rank, size, communicator.all_reduce, config.device)
        handle = answers.export_handle().as_plain()
        self._parent.report("start", is_answer=True, facts=attrs.asdict(self._facts), answers=handle)
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
        from kvplug_transformers.engine.options import EngineOptions
        from kvplug_transformers.engine.worker import Worker

        rank = self._rank
        if listen not in (None, "unix:") and not listen.endswith(":0"):  # these two: any name, any port
            listen = Config.address_beside(listen, rank)
        common: dict[str, Any] = {"rank": rank, "size": self._size}
        model, facts, made = self._model, self._facts, EngineOptions(**options)
        if connects:
            common |= {"wrap_pipe": self._wrap_pipe, "listen": listen, "connect": connect}
            worker = Worker.connected(model, facts, made, self._config, **common)
            self._stack.callback(worker.shutdown)
        else:
            worker = Worker(model, facts, made, **common)
        self._workers[engine] = worker
        return {"metadata": worker.handshake_metadata.get(0), "contacts": worker.contacts}

    def _do_ready(self, engine: int) -> dict[str, Any]:
        return self._workers[engine].wait_until_ready()

    def _do_step(self, engine: int, step: Mapping[str, Any]) -> dict[str, Any]:
        worker = self._workers[engine]
        sampled, output, events = worker.execute(Step.from_plain(step))
        return {
            "sampled": sampled,
            "output": attrs.asdict(output, recurse=False),
            "events": [attrs.asdict(event, recurse=False) for event in events],
            "route": worker.last_route,
        }


def main(wrap_pipe: WrapPipe | None = None) -> None:
    """``wrap_pipe`` wraps every pipe of the connector, to inject faults."""
    parent = Parent()
    parent.run(Rank(parent, wrap_pipe).serve)


if __name__ == "__main__":
    main()
