"""What comes before the first KV moves: the config is checked, a model is found, workers load it."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

import attrs

from kvplug import Config, Registry, check_config, explain_missing_pipe
from kvplug.engine import Role
from kvplug_transformers.demo.display import Display
from kvplug_transformers.demo.orders import Orders
from kvplug_transformers.demo.session import ALONE, CONVERT, PREFILL, DemoError, Session

_FOR_GPUS = "; kvplug-cuda-ipc and kvplug-pynccl bring some that do"


def check(config: Config, display: Display) -> None:
    """Refuse what cannot work, before any process is started and any model loaded.

    That no pipe here moves tensors of the device is only said: a connector may do without one.

    Raises:
        UnknownConnectorError, UnknownTransportError, AmbiguousNameError: with the names that are known.
        ConfigError: every other fault of names and options.
        InsecureAddressError: other hosts can reach the address, and there is no secret.
    """
    registry = Registry.from_env()
    # Each worker gets a role of its own.
    check_config(attrs.evolve(config, role=Role.PRODUCER), registry)
    if (lack := explain_missing_pipe(config, registry)) is not None:
        display.note(lack + (_FOR_GPUS if config.device.partition(":")[0] == "cuda" else ""))


def model_folder(orders: Orders, session: Session, display: Display) -> Path:
    """The folder to load from; the packaged model is converted if it has not been yet.

    Raises:
        DemoError: there is no such folder.
        ModelMissingError: the package is not installed, and how to get it.
    """
    from kvplug_transformers.model.bundled import find_gguf
    from kvplug_transformers.model.cache import folder_for, is_complete, sweep

    if orders.model is not None:
        if not (orders.model / "config.json").is_file():
            raise DemoError(f"{orders.model} is no Hugging Face model folder: it has no config.json")
        return orders.model.resolve()
    source = find_gguf()
    folder = folder_for(source)
    if not is_complete(folder):
        display.note(f"unpacking {source.name} once, into {folder} (about 20 s)")
        session.start(CONVERT)
        session.tell(CONVERT, "convert", source=str(source))
        try:
            session.wait_for((CONVERT, "converted"))
        except BaseException:
            # Ended in the middle it leaves half a model behind.
            session.kill(CONVERT)
            sweep(folder)
            raise
        session.tell(CONVERT, "stop")
    return folder


def listen_address(config: Config) -> str | None:
    """Where the prefill worker listens when nobody cares: a name nobody else has. ``None``: as configured."""
    if any(config.source_of(key) != "default" for key in ("host", "port", "port_offset")):
        return None
    abstract = f"unix:@kvplug-demo-{os.getpid()}-{secrets.token_hex(4)}"
    return abstract if sys.platform == "linux" else "127.0.0.1:0"


def start_worker(session: Session, name: str, folder: Path, orders: Orders) -> None:
    session.start(name)
    role = "producer" if name == PREFILL else "consumer"
    session.tell(name, "start", role=role, model=str(folder), threads=num_cpus(), orders=orders.to_plain())


def start_reference(session: Session, folder: Path, device: str) -> None:
    """On the same device: where two devices round differently, they may choose different tokens."""
    session.start(ALONE)
    session.tell(ALONE, "start", model=str(folder), threads=num_cpus(), device=device)


def num_cpus() -> int:
    """Processors this process may use. The workers compute one after another, so each may have all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode(session: Session, name: str, orders: Orders, context: int) -> tuple[list[int], list[int]]:
    """Token ids of the prompt, and those that end the text.

    Raises:
        DemoError: the prompt does not fit the model's context.
    """
    session.tell(name, "encode", prompt=orders.prompt)
    (said,) = session.wait_for((name, "tokens"))
    ids: list[int] = said["ids"]
    if len(ids) + orders.max_new_tokens > context:
        raise DemoError(
            f"the prompt has {len(ids)} tokens, which with {orders.max_new_tokens} new ones is more than"
            f" the model's context of {context}: shorten the prompt, or lower --max-new-tokens"
        )
    return ids, said["stop"]


def too_short(ids: list[int], orders: Orders) -> str | None:
    if len(ids) > orders.block_size:
        return None
    return (
        f"the prompt has {len(ids)} tokens and a block {orders.block_size}: only whole blocks before the last"
        " token move, so nothing could be transferred"
    )
