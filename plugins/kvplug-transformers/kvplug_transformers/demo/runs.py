"""The demo's three programs, the whole demo and its two halves: the commands for each process, in order."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from kvplug import (
    Config,
    ConnectorInfo,
    PeerGoneError,
    Registry,
    check_config,
    worker_transports,
)
from kvplug.engine import Role
from kvplug_transformers.demo.display import Display
from kvplug_transformers.demo.settings import DemoSettings, Report
from kvplug_transformers.engine.rank import config_to_plain, on_one_host
from kvplug_transformers.processes import Event, ProcessError, Processes, command_of

PREFILL, DECODE, REFERENCE, CONVERT = "prefill", "decode", "reference", "convert"

_COMMANDS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys((PREFILL, DECODE, CONVERT), command_of("kvplug_transformers.demo.worker")),
    REFERENCE: (sys.executable, "-P", str(Path(__file__).with_name("reference.py"))),
}
_OF_WORKERS = ("prompt", "max_new_tokens", "at_once", "block_size", "layout", "policy")
"""The settings that workers need."""
_FOR_GPUS = "; kvplug-cuda-ipc and kvplug-pynccl bring some that do"


class DemoError(Exception):
    """The demo cannot continue. The message is for its user."""


class Demo:
    """The processes of one demo, and the notes about what went wrong. On exit it ends the processes: politely
    after success, otherwise with SIGKILL.

    Methods raise DemoError, KvplugError: the demo failed; the message says why.
    """

    def __init__(
        self, settings: DemoSettings, display: Display, commands: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        """Refuse a config that cannot work, before any process is started and any model loaded.

        If no pipe is installed for the config's device, this only prints a note: a connector may need none.

        Args:
            commands: command lines instead of the usual ones, by process.

        Raises:
            UnknownConnectorError, UnknownTransportError, AmbiguousNameError: a name is wrong; lists the known
            names. PluginError: several workers have no queue or communicator. ConfigError: other names or
            options are wrong; lists every fault. InsecureAddressError: other hosts can reach the address, and
            there is no secret.
        """
        config = Config.load(settings.config, overrides=settings.overrides)
        self._settings, self._display, self._config = settings, display, config
        self._notes: list[str] = []
        self._ids: list[int] = []
        """The prompt."""
        self._stop: list[int] = []
        registry = Registry.from_env()
        # Each worker has its own role.
        check_config(attrs.evolve(config, role=Role.BOTH), registry)
        if (lack := ConnectorInfo(config, registry).missing_pipe) is not None:
            display.note(lack + (_FOR_GPUS if config.device.partition(":")[0] == "cuda" else ""))
        self._between: dict[str, Any] = {"queue": "", "communicator": ""}
        if max(settings.tensor_parallel) > 1:
            self._between |= worker_transports(on_one_host(config), registry)
        self._commands = {**_COMMANDS, **(commands or {})}
        self._processes = Processes(
            # The workers' own deadlines come first, since their errors have more details.
            patience_s=settings.patience_s + max(config.connect_timeout_s, config.timeout_s),
            advice="give it longer with --patience",
            show=display.show,
        )

    def __enter__(self) -> Demo:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._processes.close(at_once=kind is not None)

    # -- the three programs --------------------------------------------------------------------------

    def run(self) -> Report:
        """The whole demo: prefill, transfer, decode, and the two comparisons."""
        processes = self._processes
        self._load(PREFILL, DECODE, REFERENCE)
        listen = None
        if all(self._config.source_of(key) == "default" for key in ("host", "port", "port_offset")):
            listen = f"unix:@kvplug-demo-{os.getpid()}-{secrets.token_hex(4)}-0"
        opened = processes.ask(PREFILL, "open", listen=listen, connect=None)
        processes.ask(DECODE, "open", listen=None, connect=opened["contact"] or None)
        for name in (PREFILL, DECODE):
            processes.send(name, "ready")
        _, ready = processes.answers(PREFILL, DECODE)
        prefilled: Event = {"found": 0, "params": None}
        try:
            prefilled = processes.ask(PREFILL, "prefill")
        except (PeerGoneError, ProcessError) as e:
            if self._settings.policy == "fail":
                raise DemoError(f"{e}, and the policy is to fail") from e
            self._note(f"{e}: KV that has not arrived is recomputed")
        return self._decode_and_compare(ready, prefilled)

    def run_prefill(self, listen: str | None) -> None:
        """The first terminal: prefill, print the command for the second terminal, and keep the KV until
        Ctrl-C.
        """
        if self._config.connector.rpartition(":")[2] == "p2p":  # others show it only by what prefill returns
            raise self._needs_one_terminal
        self._load(PREFILL)
        opened = self._processes.ask(PREFILL, "open", listen=listen, connect=None)
        self._display.serving(opened["contact"], self._settings.tensor_parallel[0])
        self._processes.ask(PREFILL, "ready")
        if self._processes.ask(PREFILL, "prefill")["params"] is not None:
            raise self._needs_one_terminal
        self._display.note("the KV cache is ready; Ctrl-C ends this")
        try:
            raise self._processes.wait_for_end(PREFILL)
        except KeyboardInterrupt:
            self._processes.close()  # not killed, so that it removes the file of its Unix socket
            raise

    def run_decode(self, connect: str | None) -> Report:
        """The second terminal: load from the prefill worker at ``connect``, decode, compare."""
        self._load(DECODE, REFERENCE)
        self._processes.ask(DECODE, "open", listen=None, connect=connect)
        self._display.note("connecting to the prefill worker")
        return self._decode_and_compare(self._processes.ask(DECODE, "ready"), None)

    @property
    def _needs_one_terminal(self) -> DemoError:
        name = self._config.connector
        return DemoError(
            f"connector {name!r} hands KV over by a reference, which the second terminal does not get:"
            f" use `kvplug demo --connector {name}`"
        )

    # -- their steps ---------------------------------------------------------------------------------

    def _note(self, text: str, *, shown: bool = True) -> None:
        self._notes.append(text)
        if shown:
            self._display.note(text)

    def _load(self, *names: str) -> None:
        """Start these processes, and let each load the model.

        Raises:
            DemoError: the prompt does not fit the model's context, or the cached model may be damaged; or as
                for :meth:`_model_folder`.
        """
        settings, config = self._settings, self._config
        folder = self._model_folder()
        # Workers compute one after another, so each uses all CPUs.
        threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        for name in names:
            self._processes.start(name, self._commands[name])
            common = {"model": str(folder), "threads": threads}
            if name == REFERENCE:
                # On the same device: other devices may round differently and choose different tokens.
                self._processes.send(name, "start", device=config.device, **common)
                continue
            # With stores, the prefill worker also loads their KV, such as that of an earlier run.
            produces = "producer" if config.source_of("stores") == "default" else "both"
            overrides = {**settings.overrides, "role": produces if name == PREFILL else "consumer"}
            self._processes.send(
                name,
                "start",
                config=config_to_plain(Config.load(settings.config, overrides=overrides)),
                num_workers=settings.tensor_parallel[name != PREFILL],
                corrupt=settings.corrupt and name == PREFILL,
                **{key: getattr(settings, key) for key in _OF_WORKERS},
                **common,
            )
        self._display.step(f"{', '.join(names)}: loading the model")
        try:
            loaded = self._processes.answers(*names)[0]
        except (PeerGoneError, ProcessError) as e:
            if settings.model is None and (isinstance(e, PeerGoneError) or str(folder) in str(e)):
                raise DemoError(f"{e}\nif {folder} is damaged, remove it: the next run makes it again") from e
            raise
        self._ids, self._stop = loaded["ids"], loaded["stop"]
        count = len(self._ids)
        if count + settings.max_new_tokens > loaded["context"]:
            raise DemoError(
                f"the prompt has {count} tokens, which with {settings.max_new_tokens} new ones is more than"
                f" the model's context of {loaded['context']}: shorten the prompt, or lower --max-new-tokens"
            )
        if count <= settings.block_size:
            self._note(
                f"the prompt has {count} tokens and a block {settings.block_size}: only whole blocks before"
                " the last token move, so nothing could be transferred"
            )

    def _model_folder(self) -> Path:
        """The folder to load from; the packaged model is converted first if necessary.

        Raises:
            DemoError: there is no such folder.
            ModelMissingError: the package is not installed; the message says how to install it.
        """
        from kvplug_transformers.model.bundled import find_gguf
        from kvplug_transformers.model.cache import folder_for, make_once

        model = self._settings.model
        if model is not None:
            if not (model / "config.json").is_file():
                raise DemoError(f"{model} is not a Hugging Face model folder: it has no config.json")
            return model.resolve()
        source = find_gguf()
        folder = folder_for(source)
        return make_once(folder, lambda target: self._convert(source, folder, target))

    def _convert(self, source: Path, folder: Path, target: Path) -> None:
        """Convert the model in a process of its own, since this needs much memory."""
        self._display.note(f"unpacking {source.name} once, into {folder} (about 20 s)")
        try:
            self._processes.start(CONVERT, self._commands[CONVERT])
            self._processes.ask(CONVERT, "convert", source=str(source), target=str(target))
        finally:
            self._processes.close(at_once=True)

    def _decode_and_compare(self, ready: Event, prefilled: Event | None) -> Report:
        """Decode, then compute the same prompt without a transfer, then let the reference process generate.

        ``prefilled``: prefill's answer; ``None``: another program prefills. Its ``params`` are valid once: to
        repeat, prefill computes the prompt again.
        """
        settings, processes = self._settings, self._processes
        params = prefilled and prefilled["params"]
        waits = prefilled is None and len(self._ids) > settings.block_size
        patience_s = self._config.connect_timeout_s if waits else 0.0
        decoded = processes.ask(DECODE, "decode", patience_s=patience_s, params=params)
        self._note_if_lost(prefilled)
        report = decoded["report"]
        why = ", ".join(f"{reason} ({count})" for reason, count in sorted(decoded["failures"].items()))
        if decoded["error"]:
            text = decoded["error"] + (f": {why}" if why else "")
            self._note(text, shown=decoded["finish_reason"] == "error")
        elif not report["tokens_loaded"] and not self._notes:
            self._note(
                f"the {PREFILL} process had no KV of this prompt, so nothing was transferred: give both the"
                " same"
            )
        pairs = []
        for _ in range(settings.repeat if report["tokens_loaded"] else 0):
            every = [
                processes.ask(PREFILL, "prefill")["params"] if params is not None else None
                for _ in range(settings.at_once)
            ]
            if (pair := processes.ask(DECODE, "repeat", params=every)["pair"]) is not None:
                pairs.append(tuple(pair))
        self._display.step(f"{REFERENCE}: generating")
        generated = processes.ask(
            REFERENCE, "generate", ids=self._ids, max_new_tokens=settings.max_new_tokens, stop=self._stop
        )
        if generated["imported"]:
            raise DemoError(f"the reference process has imported {', '.join(generated['imported'])}")
        if decoded["ids"] != generated["ids"]:
            self._note(f"decoded tokens {decoded['ids']}; model.generate gives {generated['ids']}")
        self._note_if_lost(prefilled)
        return Report(
            **report,
            **self._between,
            tokens_found=prefilled["found"] if prefilled else 0,
            ttft_pairs=tuple(pairs),
            identical=decoded["ids"] == generated["ids"],
            connector=self._config.connector,
            transport=ready["transport"],
            tensor_parallel=settings.tensor_parallel,
            device=self._config.device,
            reasons=(*ready["reasons"], *self._notes),
        )

    def _note_if_lost(self, prefilled: Event | None) -> None:
        """Note it if the prefill worker, or a process that shares its model, has ended by now."""
        if prefilled is not None and self._processes.has_ended(PREFILL):
            error = str(self._processes.fault(PREFILL))
            if not any(error in note for note in self._notes):
                self._note(error)
