"""Fixtures for kvplug inside vLLM. Without vLLM these tests are not collected; `tox run -e vllm` installs
it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import attrs
import pytest

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]

FOLDER = Path(__file__).parent
LENGTHS = {100: 40, 300: 300, 700: 650, 1500: 200}
"""The number of tokens of each prompt, and its start in the text."""


def module_of(name: str) -> Any:
    """A module next to this file; test files are not importable by name."""
    spec = importlib.util.spec_from_file_location(f"kvplug_vllm_tests_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


engines = module_of("engines")


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
    """``random_model("latent")``: a folder with the small model that ``write_random_latent`` of models.py
    writes."""

    @functools.cache
    def write(kind: str) -> str:
        folder = tmp_path_factory.mktemp(f"random-{kind}")
        getattr(module_of("models"), f"write_random_{kind}")(folder, like=model)
        return str(folder)

    return write


@pytest.fixture(scope="session")
def random_llama(random_model: Callable[[str], str]) -> str:
    """A folder with a small model whose heads divide by two; see models.py."""
    return random_model("llama")


@pytest.fixture(scope="session")
def start(model: str) -> Callable[..., AbstractContextManager[Any]]:
    """``start(transfer_config, **settings)``: an engine in a separate process; see engines.py."""

    def start_engine(transfer: dict[str, Any] | None = None, **more: Any) -> AbstractContextManager[Any]:
        return engines.engine(more.pop("model", model), transfer, **more)

    return start_engine


@pytest.fixture(scope="session")
def alone(start: Any, prompts: dict[int, list[int]]) -> dict[int, tuple[int, ...]]:
    """The output of an engine without kvplug for each prompt."""
    with start() as only:
        return {length: only.one(prompt).tokens for length, prompt in prompts.items()}


@pytest.fixture(scope="session")
def servers() -> Any:
    """The module servers.py."""
    return module_of("servers")


@pytest.fixture(scope="session")
def proxied() -> Any:
    """The module proxied.py."""
    return module_of("proxied")


@pytest.fixture(scope="session")
def multiprocess() -> dict[str, str]:
    """Environment of an engine whose core runs in a separate process."""
    return dict(engines.MULTIPROCESS)


@pytest.fixture(scope="session")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The module probe.py, as a separate distribution in the folder of its ``PYTHONPATH``."""
    module = module_of("probe")
    site = tmp_path_factory.mktemp("site")
    module.PYTHONPATH = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    (site / "kvplug_probe.py").write_text((FOLDER / "probe.py").read_text(encoding="utf-8"), encoding="utf-8")
    info = site / "kvplug_probe-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvplug-probe\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvplug]\nprobe = kvplug_probe\n")
    return module


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

    def install(name: str) -> InstalledPlugin:
        folder = tmp_path_factory.mktemp(name)
        source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
        (folder / f"kvplug_{name}.py").write_text(source, encoding="utf-8")
        info = folder / f"kvplug_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvplug-{name}\nVersion: 1.0\n")
        entry_point = f"[vllm.general_plugins]\n{name} = kvplug_{name}:register\n"
        (info / "entry_points.txt").write_text(entry_point)
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        return InstalledPlugin(folder, path)

    return install


@pytest.fixture(scope="session")
def made(model: str) -> Callable[..., Any]:
    """``made(policy, *ports, plans_ahead=False)``: vLLM's scheduler with connectors; see stepping.py."""
    stepping = module_of("stepping")

    def make(policy: str = "recompute", *ports: int, **more: Any) -> Any:
        return stepping.Made(model, policy, ports, **more)

    return make


@pytest.fixture(scope="module")
def exits() -> Iterator[ExitStack]:
    """Closes everything that a module's fixtures opened, in reverse order."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def port(free_port: Callable[[], int]) -> int:
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


@pytest.fixture(scope="session")
def config_for() -> Callable[..., dict[str, Any]]:
    """``config_for(role, port, **extra)``: a kv-transfer-config for the connector "lookup"."""
    return engines.transfer_config
