"""The steps before KV moves: check the config, find the model, let workers load it."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import attrs

from kvplug import Config, ConnectorInfo, Registry, check_config, worker_transports
from kvplug.engine import Role
from kvplug_transformers.demo.display import Display
from kvplug_transformers.demo.session import CONVERT, PREFILL, REFERENCE, DemoError, Session
from kvplug_transformers.demo.settings import DemoSettings
from kvplug_transformers.engine.rank import on_one_host

_FOR_GPUS = "; kvplug-cuda-ipc and kvplug-pynccl bring some that do"


def check(config: Config, settings: DemoSettings, display: Display) -> dict[str, str]:
    """Refuse a config that cannot work, before any process is started and any model loaded.

    If no pipe is installed for the config's device, this only prints a note: a connector may need no pipe.

    Returns:
        The names of the queue and of the communicator, if an engine has several workers.

    Raises:
        UnknownConnectorError, UnknownTransportError, AmbiguousNameError: a name is wrong; lists the known
        names. PluginError: several workers have no queue or communicator. ConfigError: other names or options
        are wrong; lists every fault. InsecureAddressError: other hosts can reach the address, and there is no
        secret.
    """
    registry = Registry.from_env()
    # Each worker has its own role.
    check_config(attrs.evolve(config, role=Role.BOTH), registry)
    if (lack := ConnectorInfo(config, registry).missing_pipe) is not None:
        display.note(lack + (_FOR_GPUS if config.device.partition(":")[0] == "cuda" else ""))
    return worker_transports(on_one_host(config), registry) if max(settings.tensor_parallel) > 1 else {}


def model_folder(settings: DemoSettings, session: Session, display: Display) -> Path:
    """The folder to load from; the packaged model is converted first if necessary.

    Raises:
        DemoError: there is no such folder.
        ModelMissingError: the package is not installed; the message says how to install it.
    """
    from kvplug_transformers.model.bundled import find_gguf
    from kvplug_transformers.model.cache import folder_for, is_complete, sweep

    if settings.model is not None:
        if not (settings.model / "config.json").is_file():
            raise DemoError(f"{settings.model} is not a Hugging Face model folder: it has no config.json")
        return settings.model.resolve()
    source = find_gguf()
    folder = folder_for(source)
    if not is_complete(folder):
        display.note(f"unpacking {source.name} once, into {folder} (about 20 s)")
        session.start(CONVERT)
        session.send(CONVERT, "convert", source=str(source))
        try:
            session.wait_for((CONVERT, "converted"))
        except BaseException:
            # Killing a process while it converts leaves an incomplete model.
            session.kill(CONVERT)
            sweep(folder)
            raise
        session.send(CONVERT, "stop")
    return folder


def listen_address(config: Config) -> str | None:
    """A unique address for the prefill worker if the config has none. ``None``: as configured."""
    if any(config.source_of(key) != "default" for key in ("host", "port", "port_offset")):
        return None
    return f"unix:@kvplug-demo-{os.getpid()}-{secrets.token_hex(4)}-0"


def start_worker(session: Session, name: str, folder: Path, config: Config, settings: DemoSettings) -> None:
    """Start a worker. With stores, the prefill worker also loads their KV, such as that of an earlier run."""
    session.start(name)
    has_stores = config.source_of("stores") != "default"
    role = ("both" if has_stores else "producer") if name == PREFILL else "consumer"
    session.send(
        name,
        "start",
        role=role,
        model=str(folder),
        threads=num_cpus(),
        num_workers=settings.tensor_parallel[name != PREFILL],
        corrupt=settings.corrupt and name == PREFILL,
        settings=settings.to_plain(),
    )


def start_reference(session: Session, folder: Path, device: str) -> None:
    """Start it on the same device: other devices may round differently and choose different tokens."""
    session.start(REFERENCE)
    session.send(REFERENCE, "start", model=str(folder), threads=num_cpus(), device=device)


def num_cpus() -> int:
    """How many CPUs this process may use. Workers compute one after another, so each uses all of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode(session: Session, name: str, settings: DemoSettings, context: int) -> tuple[list[int], list[int]]:
    """Token ids of the prompt, and those that end the text.

    Raises:
        DemoError: the prompt does not fit the model's context.
    """
    session.send(name, "encode", prompt=settings.prompt)
    (tokens,) = session.wait_for((name, "tokens"))
    ids: list[int] = tokens["ids"]
    if len(ids) + settings.max_new_tokens > context:
        raise DemoError(
            f"the prompt has {len(ids)} tokens, which with {settings.max_new_tokens} new ones is more than"
            f" the model's context of {context}: shorten the prompt, or lower --max-new-tokens"
        )
    return ids, tokens["stop"]


def too_short(ids: list[int], settings: DemoSettings) -> str | None:
    if len(ids) > settings.block_size:
        return None
    return (
        f"the prompt has {len(ids)} tokens and a block {settings.block_size}: only whole blocks before the"
        " last token move, so nothing could be transferred"
    )
