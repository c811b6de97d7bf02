"""The main program of the prefill and of the decode worker: ``python -m kvplug_transformers.demo.worker``.

It runs one engine and one connector with its two sides. The first command sets its role. The commands are the
methods ``_do_<op>`` of :class:`DemoWorker`.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence as ManyOf
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvplug import Config, ConnectorInfo, Registry, UnsupportedError, build_connector
from kvplug.engine import Parallelism, Request, RequestEnd
from kvplug.transport import Pipe
from kvplug_transformers.processes.parent_link import ParentLink, start_log

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvplug_transformers.engine.engine import Engine
    from kvplug_transformers.engine.options import EngineOptions
    from kvplug_transformers.engine.sequence import Sequence, Token
    from kvplug_transformers.engine.workers import ShardedWorker, Workers
    from kvplug_transformers.model.facts import ModelFacts
    from kvplug_transformers.model.load import LoadedModel

WrapPipe = Callable[[Pipe], Pipe]

_CHUNK = 256
"""Tokens in one step of prefill: small enough for a progress bar that moves."""
_ASK_AGAIN_S = 0.2
_FLOOR_RUNS = 3
_CORRUPT = """
from kvplug_transformers.demo.corruption import CorruptingPipe
from kvplug_transformers.engine.rank import main

main(CorruptingPipe)
"""


class DemoWorker:
    """Executes commands one after another, and reports the results."""

    def __init__(self, parent: ParentLink, wrap_pipe: WrapPipe | None = None) -> None:
        self._parent = parent
        self._wrap_pipe = wrap_pipe
        self._loaded: LoadedModel
        self._facts: ModelFacts
        self._settings: dict[str, Any]
        self._config: Config
        self._registry = Registry.from_env()
        self._engine: Engine | None = None
        self._alone: Engine
        """Without a connector."""
        self._copy_s = 0.0
        """Seconds of one copy of the loaded KV in memory."""
        self._workers: Workers | None = None
        """The processes that compute, if the engine has several."""
        self._connectors: dict[str, Any] = {}

    def run(self) -> int:
        """Run until the parent sends "stop", or a command fails. Returns the exit status."""
        try:
            return self._parent.run(self._execute)
        finally:
            for connector in self._connectors.values():
                connector.shutdown()
            if self._workers is not None:
                self._workers.close()

    def _execute(self) -> None:
        for command in self._parent.commands():
            getattr(self, f"_do_{command.pop('op')}")(**command)

    def _do_convert(self, source: str) -> None:
        """Make the folder of the packaged model."""
        from kvplug_transformers.model.convert import converted

        self._parent.send("converted", folder=str(converted(Path(source))))

    def _do_start(
        self, role: str, model: str, threads: int, num_workers: int, corrupt: bool, settings: dict[str, Any]
    ) -> None:
        """Load the model: here, or if there are several workers, its parts in processes of their own."""
        self._settings = settings
        self._config = Config.load(settings["config"], overrides={**settings["overrides"], "role": role})
        began = time.perf_counter()
        import torch

        torch.set_num_threads(threads)
        device = self._config.device
        try:
            torch.empty(1, device=device)
        except (RuntimeError, AssertionError) as e:
            why = str(e).partition("\n")[0]
            raise UnsupportedError(f"device {device!r} cannot be used on this machine: {why}") from e
        from kvplug_transformers.model.facts import describe
        from kvplug_transformers.model.load import load

        self._loaded = load(Path(model), weights=num_workers == 1)
        if num_workers > 1:
            from kvplug_transformers.engine.workers import RANK_COMMAND, Workers
            from kvplug_transformers.model.shards import check_split

            check_split(self._loaded.model, num_workers)
            self._workers = Workers(
                Path(model),
                self._config,
                num_workers,
                threads=max(1, threads // num_workers),
                command=(sys.executable, "-P", "-c", _CORRUPT) if corrupt else RANK_COMMAND,
                timeout=None,  # the parent limits the time
            )
            self._facts = self._workers.facts
            self._parent.send("loaded", seconds=time.perf_counter() - began, context=self._facts.context)
            return
        try:
            self._loaded.model.to(device)
        except RuntimeError as e:
            why = str(e).partition("\n")[0]
            raise UnsupportedError(f"the model does not fit on device {device!r}: {why}") from e
        self._facts = describe(self._loaded.model)
        self._parent.send("loaded", seconds=time.perf_counter() - began, context=self._facts.context)

    def _do_encode(self, prompt: str) -> None:
        ids = self._loaded.encode(prompt)
        self._parent.send("tokens", ids=ids, stop=list(self._loaded.stop_token_ids))

    def _do_open(self, num_tokens: int, listen: str | None, connect: str | None, corrupt: bool) -> None:
        """Build the engine, with room for one request of ``num_tokens``, and its connector.

        ``connect``: the contacts of the peer's workers, with spaces between them.
        """
        from kvplug_transformers.engine.engine import Engine
        from kvplug_transformers.engine.options import cache_config
        from kvplug_transformers.engine.worker import contacts_of

        options = self._engine_options(num_tokens)
        if self._config.device != "cpu":
            self._warm_up(num_tokens)
        contacts = None if connect is None else dict(enumerate(connect.split()))
        wrap_pipe = self._wrap_pipe
        if corrupt:
            from kvplug_transformers.demo.corruption import CorruptingPipe

            wrap_pipe = CorruptingPipe
        size = 1 if self._workers is None else self._workers.size
        build = partial(
            build_connector,
            self._config,
            model=self._facts.info,
            cache=cache_config(self._facts, options, size),
            parallelism=Parallelism(num_workers=size, tensor_size=size),
            registry=self._registry,
            wrap_pipe=wrap_pipe,
            listen=listen,
        )
        model: PreTrainedModel | ShardedWorker = self._loaded.model
        if self._workers is None:
            side = self._connectors["worker"] = build("worker", connect=contacts)
            own = contacts_of(side)
        else:
            model = self._workers.open(options, connects=True, listen=listen, connect=contacts)
            own = model.contacts
        # With the role "both" the scheduler side follows the stores of its own workers, wherever they listen.
        connect_to = contacts or dict(enumerate(own)) or None
        self._connectors["scheduler"] = build("scheduler", connect=connect_to)
        self._engine = Engine(
            model,
            options,
            facts=self._facts,
            scheduler_connector=self._connectors["scheduler"],
            worker_connector=self._connectors.get("worker"),
        )
        worker = self._engine.worker
        self._parent.send("opened", contact=" ".join(worker.contacts))
        choice = worker.wait_until_ready()
        self._connectors["scheduler"].wait_until_ready()
        self._parent.send("ready", **choice)

    def _engine_alone(self, options: EngineOptions) -> Engine:
        """An engine without a connector, over the same model."""
        from kvplug_transformers.engine.engine import Engine

        model = self._loaded.model if self._workers is None else self._workers.open(options)
        return Engine(model, options, facts=self._facts)

    def _warm_up(self, num_tokens: int) -> None:
        """Compute ``num_tokens`` arbitrary tokens, in an engine without a connector.

        A GPU loads each kernel at its first use. Without a warm-up, the first measurement, with the transfer,
        would include this, and the second one, without a transfer, would not.
        """
        engine = self._engine_alone(self._engine_options(num_tokens))
        engine.add([0] * max(1, num_tokens - 2), max_new_tokens=2)
        for _ in engine.run():
            self._parent.send("warming")

    def _engine_options(self, num_tokens: int) -> EngineOptions:
        from kvplug_transformers.engine.blocks import blocks_for
        from kvplug_transformers.engine.options import EngineOptions

        insisted = ConnectorInfo(self._config, self._registry).required_layout
        return EngineOptions(
            block_size=self._settings["block_size"],
            num_blocks=blocks_for(num_tokens, self._settings["block_size"]) * self._settings["at_once"],
            max_requests=self._settings["at_once"],
            layout=self._settings["layout"] or insisted or "KBTHD",
            max_tokens_per_step=_CHUNK,
            load_failure_policy=self._settings["policy"],
        )

    def _do_prefill(self, ids: list[int]) -> None:
        """Compute the prompt and leave its KV with the connector."""
        engine = self._opened()
        began = time.perf_counter()
        sequence = engine.add(ids, max_new_tokens=1)
        params = None
        for token in self._steps(engine, sequence, "progress"):
            params = token.params
            self._parent.send("first_token", seconds=time.perf_counter() - began)
        engine.settle(timeout=self._config.timeout_s)
        found = sequence.num_loaded_tokens
        self._parent.send("prefilled", seconds=time.perf_counter() - began, found=found, params=params)

    def _do_decode(
        self,
        ids: list[int],
        max_new_tokens: int,
        stop: list[int],
        patience_s: float,
        params: dict[str, Any] | None,
    ) -> None:
        """Load the available KV, compute the rest, and generate. ``params``: the result of prefill."""
        engine = self._opened()
        if patience_s:
            self._wait_for_kv(ids, patience_s)
        began = time.perf_counter()
        sequence = engine.add(ids, max_new_tokens=max_new_tokens, stop_token_ids=stop, params=params)
        first = None
        shown = ""
        for token in self._steps(engine, sequence, "decode_progress"):
            if first is None and token.token_id is not None:
                first = time.perf_counter() - began
            text = self._loaded.decode(sequence.output)
            if not text.endswith("\ufffd"):  # half a character: the next token completes it
                self._parent.send("text", text=text[len(shown) :])
                shown = text
        engine.settle(timeout=self._config.timeout_s)
        info = self._facts.info
        per_layer = 2 * info.num_kv_heads * info.head_size * _size_of(info.dtype)
        self._parent.send(
            "decoded",
            ids=sequence.output,
            text=self._loaded.decode(sequence.output),
            ttft_s=first,
            tokens_loaded=sequence.num_loaded_tokens,
            kv_bytes_per_token=info.num_layers * per_layer,
            finish_reason=sequence.finish_reason,
            error=sequence.error or sequence.load_error,
            stats=engine.stats.snapshot(),
            store=engine.worker.last_route,
        )

    def _do_recompute(self, ids: list[int], num_loaded: int, kv_bytes: int) -> None:
        """Compute the first token again, in an engine without a connector; then with the KV of
        ``num_loaded`` tokens in its own blocks already: the fastest is the floor of a transfer's time.
        """
        # Room for this prompt alone: the second time it gets the same blocks, in the same order.
        self._alone = self._engine_alone(self._engine_options(len(ids)))
        (computed,), recompute_s = self._first_token(self._alone, ids)
        if self._settings["at_once"] > 1:  # its pool hands out blocks in the order in which they are freed
            self._first_token(self._alone, ids, params=[None] * self._settings["at_once"])
        floor_s = None
        if num_loaded:
            self._copy_s = _copy_seconds(kv_bytes)
            again = [self._first_token(self._alone, ids, num_loaded) for _ in range(_FLOOR_RUNS)]
            # Another number of tokens in one step rounds differently, and may choose another token.
            if all(sequence.output == computed.output for (sequence,), _ in again):
                floor_s = min(seconds for _, seconds in again) + self._copy_s
        self._parent.send("recomputed", ttft_s=recompute_s, floor_s=floor_s)

    def _do_repeat(self, ids: list[int], num_loaded: int, params: list[dict[str, Any] | None]) -> None:
        """After :meth:`_do_recompute`: compute the first tokens of concurrent requests, one for each of
        ``params``, with a transfer and with the KV in place."""
        loaded, with_s = self._first_token(self._opened(), ids, params=params)
        in_place, seconds = self._first_token(self._alone, ids, num_loaded, [None] * len(params))
        is_alike = all(
            ours.num_loaded_tokens == num_loaded and ours.output == theirs.output
            for ours, theirs in zip(loaded, in_place, strict=True)
        )
        floor_s = seconds + self._copy_s * len(params)
        self._parent.send("repeated", pair=(with_s, floor_s) if is_alike else None)

    def _first_token(
        self,
        engine: Engine,
        ids: list[int],
        num_in_place: int = 0,
        params: ManyOf[dict[str, Any] | None] = (None,),
    ) -> tuple[list[Sequence], float]:
        """Make a request for each of ``params``. Also returns the seconds until all have a first token."""
        began = time.perf_counter()
        sequences = [engine.add(ids, max_new_tokens=1, params=given) for given in params]
        for sequence in sequences if num_in_place else ():
            sequence.num_computed_tokens = num_in_place
        for sequence in sequences:
            for _ in self._steps(engine, sequence, "recompute_progress"):
                pass
        return sequences, time.perf_counter() - began

    def _steps(self, engine: Engine, sequence: Sequence, event: str) -> Iterator[Token]:
        """Step until the request has ended; yields its tokens, and reports progress of its prompt."""
        done, total = 0, len(sequence.prompt)
        while sequence.finish_reason is None:
            yield from engine.step()
            if not sequence.output and sequence.num_computed_tokens != done:
                done = sequence.num_computed_tokens
                self._parent.send(event, done=done, total=total)

    def _wait_for_kv(self, ids: list[int], patience_s: float) -> None:
        """Wait until the peer, which may still compute this prompt, has its KV; at most ``patience_s``.

        Asks the scheduler side, as an engine does for a request that it has not admitted yet.
        """
        scheduler = self._connectors["scheduler"]
        end = time.monotonic() + patience_s
        for number in range(1 << 30):
            request = Request(
                request_id=f"is-it-there-{number}", token_ids=tuple(ids), num_prompt_tokens=len(ids)
            )
            scheduler.on_new_request(request)
            while (found := scheduler.get_num_new_matched_tokens(request, 0)[0]) is None:
                if time.monotonic() > end:
                    break
                time.sleep(0.001)
            scheduler.request_finished(request, ((),), RequestEnd.ABORTED)
            if found or time.monotonic() > end:
                return
            self._parent.send("waiting")
            time.sleep(_ASK_AGAIN_S)

    def _opened(self) -> Engine:
        assert self._engine is not None, "the parent opens before it runs"
        return self._engine


def _size_of(dtype: str) -> int:
    import torch

    size: int = getattr(torch, dtype).itemsize
    return size


def _copy_seconds(nbytes: int) -> float:
    """Seconds of a copy of ``nbytes`` by one thread into existing memory: the median of five."""
    import torch

    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    taken = []
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def main(wrap_pipe: WrapPipe | None = None) -> None:
    """``wrap_pipe`` wraps every pipe; tests inject faults with it."""
    parent = ParentLink()
    start_log()
    os.environ["HF_HUB_OFFLINE"] = "1"
    status = DemoWorker(parent, wrap_pipe).run()
    sys.stderr.flush()
    os._exit(status)  # everything is shut down; the interpreter's own shutdown only takes longer


if __name__ == "__main__":
    main()
