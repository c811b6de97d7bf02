"""The program that inspects one installed plugin: which laws it breaks, and what could not be checked.

It runs in a process that has loaded only the plugin and its dependencies, and writes JSON, a line for each
fact, so that after a crash the step is known. :mod:`kvplug_testing.contract.plugin` reads them.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib import metadata
from typing import Any, Final

_HEAVY = """
accelerate cupy cv2 flash_attn flashinfer gguf jax jaxlib keras lmcache matplotlib mooncake mpi4py mxnet nixl
numba numpy onnxruntime openvino pandas polars pyarrow pycuda ray scipy sglang sklearn sympy tensorflow
tensorrt torch torchaudio torchvision transformers triton ucp ucxx vllm xformers zmq
"""
HEAVY: Final = frozenset(_HEAVY.split())
"""Top-level packages that ``kvplug list`` must not load: slow to import, large, or they open a device."""

_NO_DEVICE = re.compile(r"/dev/(null|zero|full|u?random|tty|ptmx|std(in|out|err)|(shm|pts|fd)(/.*)?)")


class PluginInspector:
    """Inspects the plugin whose entry point is called ``name``, and writes what it finds to a file."""

    def __init__(self, name: str, path: str) -> None:
        self._name = name
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - as long as the process lives
        self._opened: list[str] = []
        sys.addaudithook(self._audit)

    def look(self) -> None:
        """Do what ``kvplug list`` does, and nothing else."""
        from kvplug import PluginError
        from kvplug.kit import check_api, discover

        found = discover()
        mine = [each for each in found if each.name == self._name]
        if not mine:
            there = ", ".join(sorted({each.name for each in found})) or "none"
            what = f"no entry point named {self._name!r} is installed in the group kvplug; there are: {there}"
            self._breach("PLUGIN-1", what)
            return
        modules = {each.module for each in mine}
        points = [
            f"{each.distribution}: {each.name} = {each.entry_point.value}"
            for each in found
            if each.name == self._name or each.module in modules
        ]
        if len(points) > 1:
            self._breach("PLUGIN-1", f"several entry points lead to it: {'; '.join(points)}")
        fits = True
        try:
            check_api(mine[0].module)
        except PluginError as e:
            fits = False
            self._breach("PLUGIN-1", str(e))
        specs = self._specs(mine[0].entry_point.value, is_judged=fits)
        if not specs:
            return
        self._record(offers=True)
        for spec in specs:
            self._look_at(spec)
        self._readme(mine[0].distribution, specs)

    def use(self) -> None:
        """Do what a program does that uses each of the names."""
        for spec in self._specs("", is_judged=False):
            for what in ("factory", "worker_factory"):
                if hasattr(spec, what):
                    with self._used(what, spec, getattr(spec, what)):
                        _takes(getattr(spec, f"load_{what}")(), 1)
            if getattr(spec, "client", None) is not None:
                with self._used("client", spec, spec.client):
                    _takes(spec.load_client(), 2)
            if hasattr(spec, "target"):
                with self._used("command", spec, spec.target):
                    import click

                    command = spec.load()
                    if not isinstance(command, click.Command):
                        raise TypeError(f"{command!r} is not a click command")

    # -- what is looked at -----------------------------------------------------------------------------

    def _specs(self, value: str, *, is_judged: bool) -> tuple[Any, ...]:
        """The plugin's specs, loaded while all other plugins are blocked."""
        from kvplug import Registry
        from kvplug.kit import PluginStatus, discover

        found = discover()
        blocked = ",".join({each.name for each in found} - {self._name})
        mine, others = (
            {_top(each.module) for each in found if (each.name == self._name) is it} for it in (True, False)
        )
        before = {_top(module) for module in sys.modules}  # the kit is a plugin too
        step = f"the entry point ({value})"
        with self._step(step, "cannot be loaded"):
            registry = Registry.from_env({"KVPLUG_DISABLE_PLUGINS": blocked})
        plugin = next(each for each in registry.plugins if each.name == self._name)
        if is_judged and plugin.status is not PluginStatus.OK:
            self._breach("PLUGIN-1", f"it does not load, with all others blocked: {plugin.reason}")
        for other in sorted((others - mine) & {_top(module) for module in sys.modules} - before):
            self._breach("PLUGIN-1", f"{step} loads {other}, which is another plugin")
        return plugin.specs

    def _look_at(self, spec: Any) -> None:
        from kvplug.transport import describe_options

        of = _of(spec)
        if not spec.summary.strip():
            self._breach("PLUGIN-4", f"the {of} has no summary")
        if getattr(spec, "options", None) is not None:
            step = f"the options of the {of} ({spec.options})"
            with self._step(step, "cannot be read"):
                for row in describe_options(spec.load_options()):
                    if not row.help.strip():
                        help_ = f"the option {row.name!r} of the {of} has no help"
                        self._breach("PLUGIN-4", help_)
        has_domain = self._probe(spec)
        if hasattr(spec, "capabilities") and not spec.wraps:  # a wrapper has those of the inner transport
            self._capabilities(spec, has_domain)

    def _probe(self, spec: Any) -> bool:
        """Whether two hosts are known apart, as far as the probe says."""
        from kvplug.kit import load_target
        from kvplug.transport import Probe

        if getattr(spec, "probe", None) is None:
            return False
        step = f"the probe of the {_of(spec)} ({spec.probe})"
        has_domain = True
        with self._step(step, "gives no answer"):
            probe = load_target(spec.probe)()
            if not isinstance(probe, Probe):
                raise TypeError(f"it returned {probe!r}, not a Probe")
            if not probe.viable and not probe.reason:
                self._breach("PLUGIN-3", f"{step} says that it cannot work here, and not why")
            has_domain = not probe.viable or bool(probe.domain)
        return has_domain

    def _capabilities(self, spec: Any, has_domain: bool) -> None:
        from kvplug.kit import DEVICE_TYPES, UNSTATED, did_you_mean, may_be_device_type

        of, able = _of(spec), spec.capabilities
        if not able.devices:
            self._breach("PLUGIN-3", f"the {of} moves tensors of no device")
        for unknown in sorted({*able.devices} - {*DEVICE_TYPES}):
            if not may_be_device_type(unknown):
                hint = f"{did_you_mean(unknown, DEVICE_TYPES)}; there are: {', '.join(DEVICE_TYPES)}"
                what = f"the {of} moves tensors of {unknown!r}, which is no type of device{hint}"
                self._breach("PLUGIN-3", what)
        if able.cost is UNSTATED:
            hint = "so that auto cannot compare it: Capabilities(cost=Cost(...))"
            self._breach("PLUGIN-3", f"the {of} states no cost, {hint}")
        if not able.cross_host and not has_domain:
            how = "its probe names no domain" if spec.probe else "it has no probe that names one"
            what = f"the {of} works within one domain (cross_host=False), and {how}"
            self._breach("PLUGIN-3", f"{what}: two hosts would be taken for one")

    def _readme(self, distribution: str, specs: tuple[Any, ...]) -> None:
        headers = metadata.metadata(distribution)
        payload = getattr(headers, "get_payload", lambda: "")()
        text = str(headers["Description"] or payload or "")
        if not text.strip():
            what = f"the distribution {distribution} has no readme in its metadata"
            self._breach("PLUGIN-4", what)
            return
        unnamed = [
            _of(spec) for spec in specs if not re.search(rf"(?<![\w-]){re.escape(spec.name)}(?![\w-])", text)
        ]
        if unnamed:
            what = f"the readme of {distribution} does not name the {', '.join(unnamed)}"
            self._breach("PLUGIN-4", what)

    # -- steps -----------------------------------------------------------------------------------------

    @contextmanager
    def _step(self, step: str, failure: str, *, may_be_heavy: bool = False) -> Iterator[None]:
        """Record that a step begins. Its error breaks a law, unless it may load whatever it needs and that is
        not installed here; otherwise it must load nothing heavy and open no device.
        """
        self._record(begins=step)
        self._opened.clear()
        heavy = _heavy()
        try:
            yield
        except (Exception, SystemExit) as e:
            missing = _missing(e)
            if may_be_heavy and missing in HEAVY:
                self._record(unchecked=f"{step} was not loaded: {missing} is not installed here")
            else:
                error = " ".join(f"{type(e).__name__}: {e}".split())
                self._breach("PLUGIN-3", f"{step} {failure}: {error}")
        if not may_be_heavy:
            if loaded := sorted(_heavy() - heavy):
                self._breach("PLUGIN-2", f"{step} loads {', '.join(loaded)}")
            if opened := sorted({*self._opened, *_open_devices()}):
                self._breach("PLUGIN-2", f"{step} opens {', '.join(opened)}")
        self._record(begins="")

    def _used(self, what: str, spec: Any, target: str) -> AbstractContextManager[None]:
        step = f"the {what.replace('_', ' ')} of the {_of(spec)} ({target})"
        return self._step(step, "is not what the spec says", may_be_heavy=True)

    def _breach(self, law: str, observed: str) -> None:
        self._record(breach=[law, observed])

    def _record(self, **facts: Any) -> None:
        self._file.write(json.dumps(facts) + "\n")
        self._file.flush()

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and arguments and isinstance(arguments[0], (str, bytes)):
            path = os.fsdecode(arguments[0])
            if path.startswith("/dev/") and not _NO_DEVICE.fullmatch(path):
                self._opened.append(path)


def _of(spec: Any) -> str:
    return f"{spec.kind.replace('_', ' ')} {spec.name}"


def _heavy() -> set[str]:
    return {_top(module) for module in list(sys.modules)} & HEAVY


def _top(module: str) -> str:
    return module.partition(".")[0]


def _open_devices() -> Iterator[str]:
    """Open devices, including those that native code has opened."""
    with suppress(OSError):
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                path = os.readlink(f"/proc/self/fd/{number}")
                if path.startswith("/dev/") and not _NO_DEVICE.fullmatch(path):
                    yield path


def _missing(error: BaseException | None) -> str:
    """The missing package at the start of a chain of errors."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            return _top(error.name)
        error = error.__cause__ or error.__context__
    return ""


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


if __name__ == "__main__":
    mode, *arguments = sys.argv[1:]
    inspector = PluginInspector(*arguments)
    {"look": inspector.look, "use": inspector.use}[mode]()
    inspector._record(end=True)
