"""The main program of the prefill and of the decode worker: ``python -m kvplug_transformers.demo.worker``.

It runs one engine and one connector with its two sides. The first command sets its role. The commands are the
methods ``_do_<op>`` of :class:`DemoWorker`.
"""

from __future__ import annotations

import logging
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvplug import Config, KvplugError, Registry, UnsupportedError, build_connector, required_layout
from kvplug.engine import PeerLink, Request, RequestEnd, Side
from kvplug.transport import Pipe
from kvplug_transformers.demo.parent_link import ParentLink

if TYPE_CHECKING:
    from kvplug_transformers.engine.engine import Engine
    from kvplug_transformers.engine.sequence import Sequence, Token
    from kvplug_transformers.model.facts import ModelFacts
    from kvplug_transformers.model.load import LoadedModel

WrapPipe = Callable[[Pipe], Pipe]

_CHUNK = 256
"""Tokens in one step of prefill: small enough for a progress bar that moves."""
_ASK_AGAIN_S = 0.2
_FLOOR_RUNS = 3


def choice_of(link: PeerLink | None, device: str) -> dict[str, Any]:
    """The agreed transport, and the reason for or against each candidate."""
    if link is None:
        return {"transport": "", "reasons": []}
    agreement = link.agreement
    # KV on different kinds of device at the two ends uses the transport of CPU tensors.
    agreed = agreement.transports
    selection = agreed.get(device.partition(":")[0]) or agreed["cpu"]
    reasons = [f"{candidate.name}: {candidate.reason}" for candidate in selection.candidates]
    reasons.append(f"integrity: {agreement.checksum or 'off'}")
    return {"transport": selection.chosen, "reasons": [*reasons, *agreement.converts]}


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
        """Of one copy of the loaded KV in memory."""
        self._connectors: dict[Side, Any] = {}

    def run(self) -> int:
        """Run until the parent sends "stop", or a command fails. Returns the exit status."""
        try:
            for command in self._parent.commands():
                getattr(self, f"_do_{command.pop('op')}")(**command)
        except (KvplugError, ValueError, OSError) as e:
            self._parent.send("error", kind=type(e).__name__, text=str(e))
            return 1
        except Exception as e:
            traceback.print_exc()
            self._parent.send("error", kind=type(e).__name__, text=f"{type(e).__name__}: {e}")
            return 1
        finally:
            for connector in self._connectors.values():
                connector.shutdown()
        return 0

    def _do_convert(self, source: str) -> None:
        """Make the folder of the packaged model."""
        from kvplug_transformers.model.convert import converted

        self._parent.send("converted", folder=str(converted(Path(source))))

    def _do_start(self, role: str, model: str, threads: int, settings: dict[str, Any]) -> None:
        """Load the model."""
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

        self._loaded = load(Path(model))
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
        """Build the engine, with room for one request of ``num_tokens``, and its connector."""
        from kvplug_transformers.engine.engine import Engine
        from kvplug_transformers.engine.options import cache_config

        options = self._engine_options(num_tokens)
        if self._loaded.model.device.type != "cpu":
            self._warm_up(num_tokens)
        cache = cache_config(self._facts, options)
        wrap_pipe = self._wrap_pipe
        if corrupt:
            from kvplug_transformers.demo.corruption import CorruptingPipe

            wrap_pipe = CorruptingPipe
        for side in (Side.WORKER, Side.SCHEDULER):
            self._connectors[side] = build_connector(
                self._config,
                side,
                model=self._facts.info,
                cache=cache,
                registry=self._registry,
                wrap_pipe=wrap_pipe,
                listen=listen,
                connect=connect,
            )
        self._engine = Engine(
            self._loaded.model,
            options,
            facts=self._facts,
            scheduler_connector=self._connectors[Side.SCHEDULER],
            worker_connector=self._connectors[Side.WORKER],
        )
        self._parent.send("opened", contact=getattr(self._connectors[Side.WORKER], "contact", ""))
        for connector in self._connectors.values():
            connector.wait_until_ready()
        link = getattr(self._connectors[Side.WORKER], "link", None)
        self._parent.send("ready", **choice_of(link, self._config.device))

    def _warm_up(self, num_tokens: int) -> None:
        """Compute ``num_tokens`` arbitrary tokens, in an engine without a connector.

        A GPU loads each kernel at its first use. Without a warm-up, the first measurement, with the transfer,
        would include this, and the second one, without a transfer, would not.
        """
        from kvplug_transformers.engine.engine import Engine

        engine = Engine(self._loaded.model, self._engine_options(num_tokens), facts=self._facts)
        engine.add([0] * max(1, num_tokens - 2), max_new_tokens=2)
        for _ in engine.run():
            self._parent.send("warming")

    def _engine_options(self, num_tokens: int) -> Any:
        from kvplug_transformers.engine.blocks import blocks_for
        from kvplug_transformers.engine.options import EngineOptions

        insisted = required_layout(self._config, self._registry)
        return EngineOptions(
            block_size=self._settings["block_size"],
            num_blocks=blocks_for(num_tokens, self._settings["block_size"]),
            layout=self._settings["layout"] or insisted or "KBTHD",
            max_tokens_per_step=_CHUNK,
            load_failure_policy=self._config.failure_policy,
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
        """Load what can be loaded, compute the rest, and generate. ``params``: what prefill has returned."""
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
            store=getattr(self._connectors[Side.WORKER], "last_route", ""),
        )

    def _do_recompute(self, ids: list[int], num_loaded: int, kv_bytes: int) -> None:
        """Compute the first token again, in an engine without a connector; then with the KV of
        ``num_loaded`` tokens in its own blocks already: the fastest is the floor of a transfer's time.
        """
        from kvplug_transformers.engine.engine import Engine

        # Room for this prompt alone: the second time it gets the same blocks, in the same order.
        self._alone = Engine(self._loaded.model, self._engine_options(len(ids)), facts=self._facts)
        computed, recompute_s = self._first_token(self._alone, ids)
        floor_s = None
        if num_loaded:
            self._copy_s = _copy_seconds(kv_bytes)
            again = [self._first_token(self._alone, ids, num_loaded) for _ in range(_FLOOR_RUNS)]
            # Another number of tokens in one step rounds differently, and may choose another token.
            if all(sequence.output == computed.output for sequence, _ in again):
                floor_s = min(seconds for _, seconds in again) + self._copy_s
        self._parent.send("recomputed", ttft_s=recompute_s, floor_s=floor_s)

    def _do_repeat(self, ids: list[int], num_loaded: int, params: dict[str, Any] | None) -> None:
        """After :meth:`_do_recompute`: the first token with a transfer, and with the KV in place."""
        loaded, with_s = self._first_token(self._opened(), ids, params=params)
        in_place, seconds = self._first_token(self._alone, ids, num_loaded)
        is_alike = loaded.num_loaded_tokens == num_loaded and loaded.output == in_place.output
        self._parent.send("repeated", pair=(with_s, seconds + self._copy_s) if is_alike else None)

    def _first_token(
        self,
        engine: Engine,
        ids: list[int],
        num_in_place: int = 0,
        params: dict[str, Any] | None = None,
    ) -> tuple[Sequence, float]:
        began = time.perf_counter()
        sequence = engine.add(ids, max_new_tokens=1, params=params)
        if num_in_place:
            sequence.num_computed_tokens = num_in_place
        for _ in self._steps(engine, sequence, "recompute_progress"):
            pass
        return sequence, time.perf_counter() - began

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
        scheduler = self._connectors[Side.SCHEDULER]
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
    """Seconds of a copy of so many bytes by one thread, into memory that is there: the median of five."""
    import torch

    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    taken = []
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def _start_log() -> None:
    """Log at the level in ``KVPLUG_LOG``, which the command line has checked."""
    level = os.environ.get("KVPLUG_LOG", "").strip().upper()
    if level:
        logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def main(wrap_pipe: WrapPipe | None = None) -> None:
    """``wrap_pipe`` wraps every pipe; tests inject faults with it."""
    parent = ParentLink()
    _start_log()
    os.environ["HF_HUB_OFFLINE"] = "1"
    status = DemoWorker(parent, wrap_pipe).run()
    sys.stderr.flush()
    os._exit(status)  # everything is shut down; the interpreter's own shutdown only takes longer


if __name__ == "__main__":
    main()
