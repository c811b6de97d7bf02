"""Real vLLM engines for the tests, each in a process of its own that answers orders.

Everything of an engine is in that one process (no engine-core process, executor "uni"), so that killing
it kills all of it. Where vLLM's own processes are the point, tests say so (``MULTIPROCESS``), or start its
API server instead. Either way the process leads a group, and nothing of that group outlives the test. It
leads no session: Linux shares the processors among sessions first (autogroups), and lets threads of one
session wait for seconds while those of another call sched_yield again and again, as vLLM's waiting ones do.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import psutil

from kvplug_testing import peers

START_S = 240.0
"""An engine starts in 20 s; on a machine that does three other things, in a minute or two."""

QUIET = {
    "KVPLUG_SECRET": "of the engines of these tests",  # an address of TCP needs one
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # which a peer keeps
    "VLLM_NO_USAGE_STATS": "1",  # it would report home
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_WAIT_POLICY": "PASSIVE",  # several engines share the cores: who waits must not spin
}

MULTIPROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
"""Environment of an engine whose core runs its own loop in its own process; orders that look inside fail."""

HOST = "127.0.0.1"


@attrs.frozen
class Answer:
    """What an engine said to one prompt."""

    tokens: tuple[int, ...]
    num_cached: int
    finish_reason: str
    params: Mapping[str, Any] | None = None
    """Its kv_transfer_params."""


class Engine:
    """The test's end of one engine process."""

    def __init__(self, peer: peers.Peer) -> None:
        self.peer = peer

    def ask(self, function: str, *, timeout: float = 60.0, **arguments: Any) -> Any:
        """Call a function of inside.py, or ``"file:function"``, with the engine in its process."""
        self.peer.send([function if ":" in function else f"inside:{function}", arguments])
        return self.peer.recv(timeout=timeout)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int = 16,
        timeout: float = 300.0,
        **more: Any,
    ) -> list[Answer]:
        """Greedy. ``more`` goes to ``SamplingParams``, but for ``salt``, which goes to the prompts, and
        ``params``, the kv_transfer_params."""
        asked = {"prompts": [list(prompt) for prompt in prompts], "max_tokens": max_tokens, **more}
        answers = self.ask("generate", timeout=timeout, **asked)
        return [Answer(tuple(tokens), *rest) for tokens, *rest in answers]

    def one(self, prompt: Sequence[int], **more: Any) -> Answer:
        return self.generate([prompt], **more)[0]

    def count(self, what: str, *labels: str) -> float:
        """The sum of kvplug's counters ``kvplug_<what>_total`` with these labels, such as "op=load"."""
        return float(self.ask("count", what=what, labels=list(labels)))

    def counter(self, name: str) -> float:
        """One of vLLM's own counters."""
        return float(self.ask("counter", name=name))

    def state(self) -> dict[str, Any]:
        """What the scheduler holds: requests, used_blocks."""
        return dict(self.ask("state"))


@contextlib.contextmanager
def engine(
    model: str,
    transfer: Mapping[str, Any] | None = None,
    *,
    setup: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    life_s: float = 900.0,
    **settings: Any,
) -> Iterator[Engine]:
    """A vLLM engine. ``transfer``: its kv-transfer-config. ``settings``: more arguments of ``LLM``, and
    ``events``: its kv-events-config.

    ``setup``: ``"file:function"``, of a file in this folder, one or several in a list, called in the process
    before the engine is made, to put faults and recorders in place.
    """
    environment = {**QUIET, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **(env or {})}
    if settings.get("enforce_eager", True):
        # Such an engine compiles a few functions, too, in its first steps: for a minute on busy cores.
        environment["TORCH_COMPILE_DISABLE"] = "1"
    arguments = {"model": model, "transfer": None if transfer is None else dict(transfer), **settings}
    setups = [setup] if isinstance(setup, str) else list(setup)
    with peers.start(_serve, arguments, setups, timeout_s=life_s, env=environment) as peer:
        try:
            assert peer.recv(timeout=START_S) == "ready"
            yield Engine(peer)
            peer.send(None)
            peer.result(timeout=60.0)
        finally:
            kill_group(peer.pid)


def kill_group(leader: int) -> None:
    """Kill what is left of the process group that a process leads, or led."""
    for process in group(leader):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def group(leader: int) -> list[psutil.Process]:
    """The processes of a group, whatever their parents are by now; no zombies."""
    return [process for process in psutil.process_iter() if _group_of(process) == leader and runs(process)]


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended; a zombie has."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _group_of(process: psutil.Process) -> int:
    try:
        return os.getpgid(process.pid)
    except OSError:
        return -1


def transfer_config(role: str, port: int, **extra: Any) -> dict[str, Any]:
    """What ``--kv-transfer-config`` says: connector "lookup" on loopback, unless ``host`` is given.

    It waits as long as it takes for what the peer has stored and sends, and loads whatever that is: a busy
    machine may lose nothing.
    """
    policy = {key: extra.pop(key) for key in ("kv_load_failure_policy", "engine_id") if key in extra}
    options = extra.pop("options", {})
    patient = {"wait_timeout_s": 60.0, "stall_timeout_s": 60.0, "load_policy": "always"}
    options = {**options, "lookup": {**patient, **options.get("lookup", {})}}
    return {
        "kv_connector": "KvplugConnector",
        "kv_role": role,
        **policy,
        "kv_connector_extra_config": {
            "connector": "lookup",
            "transport": "auto",
            "host": HOST,
            "port": port,
            "timeout_s": 300.0,
            "options": options,
            **extra,
        },
    }


# -- in the engine's process ------------------------------------------------------------------------


def _serve(parent: peers.Parent, settings: dict[str, Any], setups: list[str]) -> None:
    os.setpgid(0, 0)
    warnings.simplefilter("ignore")
    for setup in setups:
        _function(setup)()
    from vllm import LLM
    from vllm.config import KVEventsConfig, KVTransferConfig

    transfer, events = settings.pop("transfer"), settings.pop("events", None)
    usual = {
        "enforce_eager": True,
        "max_num_seqs": 4,
        "max_model_len": 2048,
        "dtype": "float32",
        "disable_log_stats": False,
        "distributed_executor_backend": "uni",
    }
    llm = LLM(
        kv_transfer_config=None if transfer is None else KVTransferConfig(**transfer),
        kv_events_config=None if events is None else KVEventsConfig(**events),
        **(usual | settings),
    )
    _record_all(llm)
    parent.send("ready")
    while order := parent.recv(timeout=None):
        where, arguments = order
        parent.send(_function(where)(llm, **arguments))
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()


def _record_all(llm: Any) -> None:
    """vLLM 0.27's ``LLM`` drops the figures of a step without output, which its server records."""
    import vllm

    if not vllm.__version__.startswith("0.27."):
        return
    engine = llm.llm_engine
    get_output = engine.engine_core.get_output

    def recorded() -> Any:
        outputs = get_output()
        if not outputs.outputs and outputs.scheduler_stats is not None:
            engine.logger_manager.record(
                scheduler_stats=outputs.scheduler_stats, iteration_stats=None, mm_cache_stats=None
            )
        return outputs

    engine.engine_core.get_output = recorded


def _function(where: str) -> Any:
    """A function of a file in this folder, as the setups have left that file."""
    file, _, name = where.partition(":")
    return getattr(_module(file), name)


@functools.cache
def _module(name: str) -> Any:
    import importlib.util

    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"functions_of_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
