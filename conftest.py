"""Fixtures and hooks for all tests of the core and the plugins."""

from __future__ import annotations

import gc
import http.server
import importlib
import os
import subprocess
import sys
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import kvplug
from kvplug import Registry
from kvplug.errors import PluginLoadError
from kvplug_lab.installed_site import Site
from kvplug_testing import peers
from kvplug_testing.contract.base import session_server
from kvplug_testing.forkserver import ForkServer

# No deadline: an example's time depends on the machine's load, and tests of speed measure it themselves. A
# test that wants more or fewer examples uses a multiple of settings.default.max_examples of the profile.
settings.register_profile("kvplug", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("dev", settings.get_profile("kvplug"), max_examples=20)
settings.load_profile("kvplug")  # `--hypothesis-profile dev` of `make test` is applied later


# tox sets it, for the summary at the end of the matrix. pytest runs that tests start must not use it.
_failed_to = os.environ.pop("FAILED_TESTS_FILE", None)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write each failure and its error to the file that collects the failures of all environments."""
    if _failed_to is not None and report.failed:
        said = report.longreprtext.splitlines()
        errors = [line for line in said if line.startswith("E  ")][:10]  # stacks can follow
        lines = [f"{report.nodeid} ({report.when})", *errors, *said[-5:]]
        Path(_failed_to).parent.mkdir(parents=True, exist_ok=True)
        with Path(_failed_to).open("a") as file:
            file.writelines(f"{line[:300]}\n" for line in lines)


# -- tests in several processes ----------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--beyond-quick",
        action="store_true",
        help="run only what `make test` leaves out, and property tests with all of their examples",
    )


def unstable_tests() -> list[dict[str, Any]]:
    """The entries of ``tests/unstable.toml``, which describes them."""
    text = Path(__file__).with_name("tests").joinpath("unstable.toml").read_text()
    return tomllib.loads(text).get("test", [])  # type: ignore[no-any-return]


def _is_beyond_quick(item: pytest.Item) -> bool:
    if any(item.get_closest_marker(name) is not None for name in ("slow", "variant", "mutant", "full")):
        return True
    law = item.get_closest_marker("kvplug_law")
    has_examples = getattr(getattr(item, "function", None), "is_hypothesis_test", False)
    return has_examples or (law is not None and law.kwargs["level"] != "quick")


def _place(item: pytest.Item) -> tuple[bool, bool]:
    is_short = not item.nodeid.startswith(("plugins/", "tests/together/"))
    return item.get_closest_marker("kvplug_law") is None, is_short


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked ``timing`` run one after another: they are one group for pytest-xdist. Its processes begin
    with the longest groups: the kit's suites, then tests of several parts together, and of plugins. Failures
    of tests in ``tests/unstable.toml`` do not fail the run."""
    unstable = {test["name"]: test["reason"] for test in unstable_tests()}
    for item in items:
        if (reason := unstable.get(item.nodeid.partition("[")[0])) is not None:
            item.add_marker(pytest.mark.xfail(reason=f"unstable: {reason}", strict=False))
    if config.option.beyond_quick:
        config.hook.pytest_deselected(items=[item for item in items if not _is_beyond_quick(item)])
        items[:] = filter(_is_beyond_quick, items)
    if not config.pluginmanager.hasplugin("xdist"):
        return  # without pytest-xdist there are no groups
    if hasattr(config, "workerinput"):
        items.sort(key=_place)
    for item in items:
        if item.get_closest_marker("timing") is not None:
            item.add_marker(pytest.mark.xdist_group("timing"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadgroup`` a test without a group runs in the same process as the others of its file:
    they share fixtures and fork servers."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class ByGroupOrFile(LoadGroupScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            group = super()._split_scope(nodeid)
            return nodeid.partition("::")[0] if group == nodeid else str(group)

    return ByGroupOrFile(config, log)


# -- plugins -----------------------------------------------------------------------------------------


class _Installed:
    """Takes the place of ``Registry`` where the installed plugins are loaded to build something."""

    @staticmethod
    def from_env() -> Registry:
        variables = (os.environ.get(f"KVPLUG_{what}_PLUGINS", "") for what in ("DISABLE", "STRICT"))
        return _loaded((*sys.path, *variables))


@cache
def _loaded(_: tuple[str, ...]) -> Registry:
    return Registry.from_env()


@pytest.fixture(autouse=True, scope="session")
def _plugins_are_loaded_once() -> Iterator[None]:
    """Each side of a connector, each store and each pipe would load them, in 25 ms of processor time: most of
    what it takes to make a fake engine.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvplug.assembly.resolve.Registry", _Installed)
        yield


# -- processes that tests start ----------------------------------------------------------------------


@pytest.fixture(scope="session")
def fork_server(request: pytest.FixtureRequest) -> Iterator[ForkServer]:
    """Forks children that need torch, in milliseconds; a fresh process takes seconds to import all.

    Use ``peers.start`` for a child with its own descriptors, flags or variables, or that must not be forked.
    """
    server = ForkServer(f"{__file__}:import_plugins", forked_from=session_server(request.session))
    yield server
    server.close()


_MODULES = (
    *("torch", "hypothesis", "kvplug.cli.doctor", "kvplug.cli.list", "kvplug.cli.main"),
    *("kvplug_testing.engine", "kvplug_testing.waits"),
)


def import_plugins() -> None:
    """In a fork server: import what children need, and the plugins with what they offer. Otherwise each child
    imports these, which takes up to 0.1 s of processor time.
    """
    for module in _MODULES:
        if find_spec(module.partition(".")[0]):
            importlib.import_module(module)
    for _, spec in Registry.from_env():
        for load in ("load_options", "load_factory", "load_worker_factory"):
            with suppress(PluginLoadError):
                getattr(spec, load, bool)()


@pytest.fixture(scope="session")
def core_server() -> Iterator[Callable[[], ForkServer]]:
    """A server that forks children with the core but nothing heavy such as torch; started at first use."""
    with ExitStack() as stack:

        @cache
        def server() -> ForkServer:
            made = ForkServer.of(
                *{*kvplug._door.homes().values()}
            )  # all modules behind ``kvplug``'s public names
            stack.callback(made.close)
            return made

        yield server


@pytest.fixture(scope="session")
def output_of() -> Callable[..., str]:
    """Runs a program in a fresh interpreter, which nothing measures, and returns what it prints. It has to
    succeed, and to leave its stderr empty. Other arguments are those of ``subprocess.run``."""

    def run(program: str, *arguments: str, env: Mapping[str, str] | None = None, **given: Any) -> str:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            env=kept if env is None else env,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            **given,
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout

    return run


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fails a test that leaves a descriptor, a thread, a process or a name behind in this process."""
    gc.collect()
    with peers.nothing_left():
        yield
        gc.collect()


@pytest.fixture
def site(tmp_path: Path, core_server: Callable[[], ForkServer]) -> Site:
    return Site(tmp_path, core_server)


_STARTS = {
    "subprocess.Popen": "new",
    "os.fork": "forks of the tests' own",
    "kvplug_testing.forkserver.fork": "forks of fork servers",
}
"""Audit events of Python, and what they start. Processes that children start are not counted."""
_started: Counter[str] = Counter()


def _count_starts(event: str, _: object) -> None:
    if event in _STARTS:
        _started[event] += 1


def pytest_configure() -> None:
    sys.addaudithook(_count_starts)


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["started"] = dict(_started)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _started.update((getattr(node, "workeroutput", None) or {}).get("started", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _started:
        said = ", ".join(f"{_started[event]} {what}" for event, what in _STARTS.items())
        terminalreporter.write_line(f"processes that the tests started: {said}")


# -- OpenTelemetry -----------------------------------------------------------------------------------


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The requests that a collector received, decoded."""
    decode = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    received: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = decode.ExportTraceServiceRequest()
            request.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
            received.append(request)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return None

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=decode,zone=a")
        yield received
        server.shutdown()
        thread.join()


# -- memory and coverage -----------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Any:
    """What is collected stays: to look for garbage meanwhile takes a tenth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _what_was_there_before_is_not_collected() -> None:
    """Freeze imported objects: tests that check for leaks run the garbage collector, which then skips
    them.
    """
    gc.collect()
    gc.freeze()


if sys.version_info < (3, 12) and sys.gettrace() is not None:
    # Under coverage each thread begins with settrace, which fails while another thread is inside it: the
    # thread ends silently, and the test that waits for it fails.
    _settrace = sys.settrace

    def _set_in_turn(function: Any) -> None:
        for _ in range(1000):
            try:
                return _settrace(function)
            except RuntimeError:
                time.sleep(0.0001)
        return _settrace(function)

    sys.settrace = _set_in_turn
