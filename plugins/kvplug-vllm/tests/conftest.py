"""Fixtures for kvplug inside vLLM. Without vLLM these tests are not collected; `tox run -e vllm` installs
it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import random
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import attrs
import pytest

from vllm_engines import engine

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]

FOLDER = Path(__file__).parent
LENGTHS = {100: 40, 300: 300, 700: 650, 1500: 200}
"""The number of tokens of each prompt, and its start in the text."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-order", action="store_true", help="record vLLM's order of calls anew")
    parser.addoption("--other-vllm", metavar="FOLDER", help="a folder with another release of vLLM")


@pytest.fixture(scope="session")
def model() -> str:
    """A folder with the demo's model, for vLLM."""
    from kvplug_transformers.model.bundled import find_gguf
    from kvplug_transformers.model.convert import converted

    return str(converted(find_gguf()))


@pytest.fixture(scope="session")
def prompts(model: str, pytestconfig: pytest.Config) -> dict[int, list[int]]:
    """Prompts by their number of tokens: real text, different from the first token on."""
    from tokenizers import Tokenizer

    text = (pytestconfig.rootpath / "LICENSE").read_text(encoding="utf-8")
    tokens = Tokenizer.from_file(str(Path(model) / "tokenizer.json")).encode(" ".join(text.split())).ids
    return {length: tokens[start : start + length] for length, start in LENGTHS.items()}


@pytest.fixture(scope="session")
def random_model(model: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """``random_model("latent")``: a folder with the model of vllm_models.write_random_latent."""
    import vllm_models

    @functools.cache
    def write(kind: str) -> str:
        folder = tmp_path_factory.mktemp(f"random-{kind}")
        getattr(vllm_models, f"write_random_{kind}")(folder, like=model)
        return str(folder)

    return write


@pytest.fixture(scope="session")
def start(model: str) -> Callable[..., AbstractContextManager[Any]]:
    """``start(transfer_config, **settings)``: an engine in a separate process; see vllm_engines.py."""

    def start_engine(transfer: dict[str, Any] | None = None, **more: Any) -> AbstractContextManager[Any]:
        return engine(more.pop("model", model), transfer, **more)

    return start_engine


@pytest.fixture(scope="session")
def alone(start, prompts: dict[int, list[int]]) -> dict[int, tuple[int, ...]]:
    """The output of an engine without kvplug for each prompt."""
    with start() as only:
        return {length: only.one(prompt).tokens for length, prompt in prompts.items()}


@attrs.frozen
class InstalledPlugin:
    """A folder with a plugin of vLLM's, found there by its entry point."""

    folder: Path
    pythonpath: str


@pytest.fixture(scope="session")
def install_plugin(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], InstalledPlugin]:
    """``install_plugin("faulty_worker")``: the file next to this one, as the module ``kvplug_faulty_worker``.

    vLLM calls its ``register`` in each of its processes.
    """

    def installed(name: str) -> InstalledPlugin:
        folder, module = tmp_path_factory.mktemp(name), f"kvplug_{name}"
        shutil.copy(FOLDER / f"{name}.py", folder / f"{module}.py")
        info = folder / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvplug-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {module}:register\n")
        return InstalledPlugin(
            folder, os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        )

    return installed


@pytest.fixture(scope="session")
def made(model: str) -> Callable[..., Any]:
    """``made(policy, *ports, plans_ahead=False)``: vLLM's scheduler with connectors; see stepping.py."""
    import stepping

    def make(policy: str = "recompute", *ports: int, **more: Any) -> Any:
        return stepping.Stepping(model, policy, ports, **more)

    return make


@pytest.fixture
def port(free_port: Callable[[], int]) -> int:
    return free_port()


@pytest.fixture(scope="module")
def shared_port(free_port: Callable[[], int]) -> int:
    """For the engines of a whole module."""
    return free_port()


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """Ports below those that the system hands out: vLLM's processes take many of those while they start."""

    def find() -> int:
        while True:
            with socket.socket() as sock, contextlib.suppress(OSError):
                sock.bind(("127.0.0.1", random.randint(20_000, 32_000)))
                return int(sock.getsockname()[1])

    return find


@pytest.fixture
def errors(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What kvplug-vllm logs, whatever vLLM has done with the logger."""
    logger = logging.getLogger("kvplug_vllm")
    handlers, logger.handlers = logger.handlers, [caplog.handler]
    yield caplog
    logger.handlers = handlers
