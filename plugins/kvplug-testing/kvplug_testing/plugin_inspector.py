"""The program that inspects one installed plugin, and records what happens.

It runs in a separate process that has loaded only the plugin and its dependencies.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import attrs

HEAVY: Final = frozenset(
    {
        *(
            "accelerate",
            "cupy",
            "cv2",
            "flash_attn",
            "flashinfer",
            "gguf",
            "jax",
            "jaxlib",
            "keras",
            "lmcache",
        ),
        *("matplotlib", "mooncake", "mpi4py", "mxnet", "nixl", "numba", "numpy", "onnxruntime", "openvino"),
        *("pandas", "polars", "pyarrow", "pycuda", "ray", "scipy", "sglang", "sklearn", "sympy"),
        *("tensorflow", "tensorrt", "torch", "torchaudio", "torchvision", "transformers", "triton", "ucp"),
        *("ucxx", "vllm", "xformers", "zmq"),
    }
)
"""Top-level packages that ``kvplug list`` must not load: slow to import, large, or they open a device."""

_NO_DEVICE = re.compile(r"/dev/(null|zero|full|u?random|tty|ptmx|std(in|out|err)|(shm|pts|fd)(/.*)?)")
_ERRORS = (Exception, SystemExit)


class PluginInspector:
    """Records each step as one line, so that after a crash the last step is known."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - as long as the process lives
        self._opened: list[str] = []
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and arguments and isinstance(arguments[0], (str, bytes)):
            path = os.fsdecode(arguments[0])
            if path.startswith("/dev/") and not _NO_DEVICE.fullmatch(path):
                self._opened.append(path)

    def record(self, **facts: Any) -> None:
        self._file.write(json.dumps(facts) + "\n")
        self._file.flush()

    @contextmanager
    def step(self, what: str, of: str, target: str) -> Iterator[dict[str, Any]]:
        """A context around one step. An error in it is recorded as the result."""
        named = {"what": what, "of": of, "target": target}
        self.record(begins=named)
        self._opened.clear()
        heavy, answer = _heavy(), dict[str, Any]()
        error = missing = ""
        try:
            yield answer
        except _ERRORS as e:
            error, missing = _in_words(e), _missing(e)
        opened = {*self._opened, *_open_devices()}
        self.record(
            step=named
            | {"error": error, "missing": missing, "answer": answer}
            | {"heavy": sorted(_heavy() - heavy), "devices": sorted(opened)}
        )


def _heavy() -> set[str]:
    return {_top(module) for module in list(sys.modules)} & HEAVY


def _top(module: str) -> str:
    return module.partition(".")[0]


def _open_devices() -> Iterator[str]:
    """Open devices, including those that native code has opened."""
    try:
        numbers = os.listdir("/proc/self/fd")
    except OSError:
        return
    for number in numbers:
        try:
            path = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if path.startswith("/dev/") and not _NO_DEVICE.fullmatch(path):
            yield path


def _in_words(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _missing(error: BaseException | None) -> str:
    """The missing package at the start of a chain of errors."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            return error.name.partition(".")[0]
        error = error.__cause__ or error.__context__
    return ""


def _look(inspector: PluginInspector, name: str) -> None:
    """Do what ``kvplug list`` does, and nothing else."""
    from kvplug import PluginError
    from kvplug.kit import check_api, discover

    found = discover()
    mine = [each for each in found if each.name == name]
    modules = {each.module for each in mine}
    inspector.record(
        installed=sorted({each.name for each in found}),
        entry_points=[
            f"{each.distribution}: {each.name} = {each.entry_point.value}"
            for each in found
            if each.name == name or each.module in modules
        ],
        distribution=mine[0].distribution if mine else "",
    )
    if not mine:
        return
    try:
        check_api(mine[0].module)
    except PluginError as e:
        inspector.record(api_fault=str(e))
    inspector.record(readme=_readme(mine[0].distribution))
    specs = _specs(inspector, name, mine[0].entry_point.value)
    inspector.record(offers=[_offer(spec) for spec in specs])
    for spec in specs:
        _look_at(inspector, spec)


def _use(inspector: PluginInspector, name: str) -> None:
    """Do what a program does that uses each of the names."""
    for spec in _specs(inspector, name, ""):
        of = f"{spec.kind.replace('_', ' ')} {spec.name}"
        for what in ("factory", "worker_factory"):
            if hasattr(spec, what):
                with inspector.step(what, of, getattr(spec, what)):
                    _takes(getattr(spec, f"load_{what}")(), 1)
        if getattr(spec, "client", None) is not None:
            with inspector.step("client", of, spec.client):
                _takes(spec.load_client(), 2)
        if hasattr(spec, "target"):
            with inspector.step("command", of, spec.target):
                import click

                command = spec.load()
                if not isinstance(command, click.Command):
                    raise TypeError(f"{command!r} is not a click command")


def _specs(inspector: PluginInspector, name: str, value: str) -> tuple[Any, ...]:
    """The plugin's specs, loaded while all other plugins are blocked."""
    from kvplug import Registry
    from kvplug.kit import PluginStatus, discover

    found = discover()
    blocked = ",".join({each.name for each in found} - {name})
    mine, others = (
        {_top(each.module) for each in found if (each.name == name) is it} for it in (True, False)
    )
    before = {_top(module) for module in sys.modules}  # the kit is a plugin too
    with inspector.step("entry point", "", value) as answer:
        registry = Registry.from_env({"KVPLUG_DISABLE_PLUGINS": blocked})
        plugin = next(each for each in registry.plugins if each.name == name)
        if plugin.status is not PluginStatus.OK:
            answer["broken"] = plugin.reason
        answer["others"] = sorted((others - mine) & {_top(module) for module in sys.modules} - before)
    return plugin.specs


def _offer(spec: Any) -> dict[str, Any]:
    from kvplug.kit import UNSTATED

    plain = {"of": f"{spec.kind.replace('_', ' ')} {spec.name}", "name": spec.name, "summary": spec.summary}
    if not hasattr(spec, "capabilities") or spec.wraps:  # a wrapper has those of the inner transport
        return plain
    able = spec.capabilities
    return plain | {
        "devices": sorted(able.devices),
        "cross_host": able.cross_host,
        "probe": spec.probe,
        "cost_stated": able.cost is not UNSTATED,
    }


def _look_at(inspector: PluginInspector, spec: Any) -> None:
    from kvplug.kit import load_target
    from kvplug.transport import Probe, describe_options

    of = f"{spec.kind.replace('_', ' ')} {spec.name}"
    if getattr(spec, "options", None) is not None:
        with inspector.step("options", of, spec.options) as answer:
            rows = describe_options(spec.load_options())
            answer["unexplained"] = [row.name for row in rows if not row.help.strip()]
    if getattr(spec, "probe", None) is not None:
        with inspector.step("probe", of, spec.probe) as answer:
            probe = load_target(spec.probe)()
            if not isinstance(probe, Probe):
                raise TypeError(f"it returned {probe!r}, not a Probe")
            answer |= attrs.asdict(probe)


def _takes(factory: Callable[..., Any], count: int) -> None:
    """Check that the factory takes so many arguments and, if it is a class, is not abstract."""
    import inspect

    if left := sorted(getattr(factory, "__abstractmethods__", ())):
        raise TypeError(f"it cannot be made: abstract are {', '.join(left)}")
    try:
        signature = inspect.signature(factory)
    except ValueError:  # a callable that is not written in Python
        return
    signature.bind(*[object()] * count)


def _readme(distribution: str) -> str:
    from importlib import metadata

    headers = metadata.metadata(distribution)
    payload = getattr(headers, "get_payload", lambda: "")()
    return str(headers["Description"] or payload or "")


def main(mode: str, name: str, path: str) -> None:
    """The program."""
    inspector = PluginInspector(path)
    {"look": _look, "use": _use}[mode](inspector, name)
    inspector.record(end=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
