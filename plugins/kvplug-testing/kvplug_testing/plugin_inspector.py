"""Inspects one installed plugin: which laws it breaks, and what could not be checked.

:func:`inspect` runs in a process that has loaded only the plugin and its dependencies.
:mod:`kvplug_testing.contract.plugin` starts it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from typing import Any, Final

from kvplug_testing.peers import Parent

_HEAVY = """
accelerate cupy cv2 flash_attn flashinfer gguf jax jaxlib keras lmcache matplotlib mooncake mpi4py mxnet nixl
numba numpy onnxruntime openvino pandas polars pyarrow pycuda ray scipy sglang sklearn sympy tensorflow
tensorrt torch torchaudio torchvision transformers triton ucp ucxx vllm xformers zmq
"""
HEAVY: Final = frozenset(_HEAVY.split())
"""Top-level packages that ``kvplug list`` must not load: slow to import, large, or they open a device."""
ENTRY_POINT: Final = "the entry point"
"""How the step begins that loads the plugin."""

_NO_DEVICE = re.compile(r"/dev/(null|zero|full|u?random|tty|ptmx|std(in|out|err)|(shm|pts|fd)(/.*)?)")


def inspect(parent: Parent, name: str) -> tuple[list[tuple[str, str]], list[str], bool]:
    """Do what ``kvplug list`` does with the plugin whose entry point is called ``name``, then what a program
    does that uses each of its names. Sends the parent each step before it begins, and ``""`` at the end.

    Returns the breaches, what was not checked, and whether the plugin offers anything.
    """
    inspector = _Inspector(parent, name)
    specs = inspector.load()
    for spec in specs:
        inspector.look_at(spec)
    for spec in specs:
        inspector.use(spec)
    parent.send("")
    return sorted(inspector.breaches), inspector.unchecked, bool(specs)


class _Inspector:
    def __init__(self, parent: Parent, name: str) -> None:
        self._parent = parent
        self._name = name
        self.breaches: list[tuple[str, str]] = []
        """A law and an observation each."""
        self.unchecked: list[str] = []
        """A sentence for each step that was skipped because a heavy library is not installed."""
        self._opened: list[str] = []
        sys.addaudithook(self._audit)

    def load(self) -> tuple[Any, ...]:
        """The plugin's specs, loaded while all other plugins are blocked."""
        from kvplug import Registry
        from kvplug.kit import PluginStatus, did_you_mean, discover

        found = discover()
        others = {each.name: _top(each.module) for each in found if each.name != self._name}
        mine = [each for each in found if each.name == self._name]
        if not mine:
            hint = did_you_mean(self._name, others)
            known = ", ".join(sorted(others)) or "none"
            self._breach(
                "PLUGIN-1",
                f"no entry point {self._name!r} is installed in the group kvplug{hint}; installed: {known}",
            )
            return ()
        modules = {each.module for each in mine}
        points = [
            f"{each.distribution}: {each.name} = {each.module}" for each in found if each.module in modules
        ]
        if len(points) > 1:
            self._breach("PLUGIN-1", f"several entry points lead to it: {'; '.join(points)}")
        before = {_top(module) for module in sys.modules}  # the kit is a plugin too
        step = f"{ENTRY_POINT} ({mine[0].module})"
        with self._step(step, "cannot be loaded"):
            registry = Registry.from_env({"KVPLUG_DISABLE_PLUGINS": ",".join(others)})
        loaded = {_top(module) for module in sys.modules} - before - {_top(module) for module in modules}
        for other in sorted({*others.values()} & loaded):
            self._breach("PLUGIN-1", f"{step} loads {other}, which is another plugin")
        plugin = next(each for each in registry.plugins if each.name == self._name)
        if plugin.status is not PluginStatus.OK:
            self._breach("PLUGIN-1", f"it does not load, with all others blocked: {plugin.reason}")
        if plugin.specs:
            self._check_readme(mine[0].distribution, plugin.specs)
        return plugin.specs

    def look_at(self, spec: Any) -> None:
        """Check what an operator sees of it: its summary, options, probe and claims."""
        from kvplug.kit import describe_options

        of = _of(spec)
        if not spec.summary.strip():
            self._breach("PLUGIN-4", f"the {of} has no summary")
        if getattr(spec, "options", None) is not None:
            with self._step(f"the options of the {of} ({spec.options})", "cannot be read"):
                for row in describe_options(spec.load_options()):
                    if not row.help.strip():
                        self._breach("PLUGIN-4", f"the option {row.name!r} of the {of} has no help")
        has_domain = self._probe(spec)
        if hasattr(spec, "capabilities"):
            self._check_capabilities(spec, has_domain)

    def use(self, spec: Any) -> None:
        """Load what a program needs that uses it."""
        import click

        failure = "does not match the spec"
        for what in ("factory", "worker_factory", "client", "target"):
            if not (target := getattr(spec, what, None)):
                continue
            step = f"the {what.replace('_', ' ')} of the {_of(spec)} ({target})"
            with self._step(step, failure, may_be_heavy=True):
                if what != "target":
                    _check_arguments(getattr(spec, f"load_{what}")(), 2 if what == "client" else 1)
                elif not isinstance(command := spec.load(), click.Command):
                    raise TypeError(f"{command!r} is not a click command")

    def _probe(self, spec: Any) -> bool:
        """Whether the probe distinguishes two hosts."""
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
                self._breach("PLUGIN-3", f"{step} returns viable=False without a reason")
            has_domain = not probe.viable or bool(probe.domain)
        return has_domain

    def _check_capabilities(self, spec: Any, has_domain: bool) -> None:
        from kvplug.kit import UNSTATED

        of, able = _of(spec), spec.capabilities
        if not able.devices:
            self._breach("PLUGIN-3", f"the {of} moves tensors of no device")
        for device in sorted(able.devices):
            if not re.fullmatch("[a-z][a-z_]*", device):
                form = "those are lower-case letters and underscores, such as 'cuda', without an index"
                self._breach("PLUGIN-3", f"the {of} claims {device!r}, which is not a type of device; {form}")
        if able.cost is UNSTATED:
            hint = "so that auto cannot compare it: Capabilities(cost=Capabilities.Cost(...))"
            self._breach("PLUGIN-3", f"the {of} states no cost, {hint}")
        if not able.cross_host and not has_domain:
            what = f"the {of} works within one domain (cross_host=False), and no probe names one"
            self._breach("PLUGIN-3", f"{what}: two hosts would be taken for one")

    def _check_readme(self, distribution: str, specs: tuple[Any, ...]) -> None:
        headers: Any = metadata.metadata(distribution)
        text = str(headers["Description"] or headers.get_payload() or "")
        if not text.strip():
            self._breach("PLUGIN-4", f"the distribution {distribution} has no readme in its metadata")
            return
        unnamed = [
            _of(spec) for spec in specs if not re.search(rf"(?<![\w-]){re.escape(spec.name)}(?![\w-])", text)
        ]
        if unnamed:
            self._breach("PLUGIN-4", f"the readme of {distribution} does not name the {', '.join(unnamed)}")

    @contextmanager
    def _step(self, step: str, failure: str, *, may_be_heavy: bool = False) -> Iterator[None]:
        """Announce a step. Its error breaks a law, unless it may load whatever it needs and that is not
        installed here; otherwise it must load nothing heavy and open no device.
        """
        self._parent.send(step)
        self._opened.clear()
        heavy = _heavy()
        try:
            yield
        except (Exception, SystemExit) as e:
            missing = _missing(e)
            if may_be_heavy and missing in HEAVY:
                self.unchecked.append(f"{step} was not loaded: {missing} is not installed here")
            else:
                error = " ".join(f"{type(e).__name__}: {e}".split())
                self._breach("PLUGIN-3", f"{step} {failure}: {error}")
        if not may_be_heavy:
            if loaded := sorted(_heavy() - heavy):
                self._breach("PLUGIN-2", f"{step} loads {', '.join(loaded)}")
            if opened := sorted({*self._opened, *_open_devices()}):
                self._breach("PLUGIN-2", f"{step} opens {', '.join(opened)}")

    def _breach(self, law: str, observed: str) -> None:
        self.breaches.append((law, observed))

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


def _check_arguments(factory: Callable[..., Any], count: int) -> None:
    """Check that the factory takes so many arguments and, if it is a class, is not abstract."""
    from inspect import signature

    if left := sorted(getattr(factory, "__abstractmethods__", ())):
        raise TypeError(f"it cannot be made: abstract are {', '.join(left)}")
    with suppress(ValueError):  # a callable that is not written in Python
        signature(factory).bind(*[object()] * count)
