"""Plugins for tests: real packages with real metadata, in a folder that only child processes import from."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvplug_testing.forkserver import ForkServer
from kvplug_testing.peers import Parent


class Site:
    """A folder of installed packages, and processes with this folder on their path."""

    def __init__(self, folder: Path, server: Callable[[], ForkServer]) -> None:
        self.folder = folder
        self.server = server
        self.marks = folder / "marks"
        self.marks.mkdir(parents=True)
        self.path = [folder / "site"]

    def add(
        self,
        name: str,
        source: str,
        *,
        version: str = "1.0",
        entry_point: str = "",
        where: str = "site",
        files: dict[str, str] | None = None,
        readme: str = "",
    ) -> Path:
        """Install the package ``kvplug_<name>`` whose entry point ``name`` is ``kvplug_<name>.plugin``.

        Importing the package, or its entry-point module, is recorded; see :meth:`marked`.
        """
        package = self.folder / where / f"kvplug_{name}"
        package.mkdir(parents=True, exist_ok=True)
        mark = f"open({str(self.marks)!r} + '/' + __name__, 'w').close()\n"
        (package / "__init__.py").write_text(mark)
        (package / "plugin.py").write_text(mark + source)
        for file, content in (files or {}).items():
            (package / file).write_text(textwrap.dedent(content))
        line = f"{name} = {entry_point or f'kvplug_{name}.plugin'}"
        self.add_metadata(f"kvplug-{name}", version, line, where=where, readme=readme)
        return package

    def add_metadata(
        self, distribution: str, version: str, *entry_points: str, where: str = "site", readme: str = ""
    ) -> Path:
        """Add a dist-info folder with only these entry points and this readme."""
        info = self.folder / where / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        headers = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        (info / "METADATA").write_text(f"{headers}\n{readme}")
        (info / "entry_points.txt").write_text("\n".join(["[kvplug]", *entry_points]))
        return info

    def marked(self) -> set[str]:
        """Modules of these packages that any process has imported."""
        return {path.name for path in self.marks.iterdir()}

    def run(
        self, *arguments: str, timeout_s: float = 60.0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run Python with these packages installed."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith("KVPLUG_")}
        path = os.pathsep.join([*map(str, self.path), *clean.get("PYTHONPATH", "").split(os.pathsep)])
        return subprocess.run(
            [sys.executable, *arguments],
            env=clean | {"PYTHONPATH": path.rstrip(os.pathsep)} | environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def kvplug(
        self, *arguments: str, timeout_s: float = 60.0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the program ``kvplug`` with these packages installed."""
        return self.run("-m", "kvplug.cli", *arguments, timeout_s=timeout_s, **environment)

    def forked(self, target: str, given: Any, environment: dict[str, str], timeout_s: float = 60.0) -> Any:
        """Call ``target(parent, given, *place)`` in a fork of a process that has imported kvplug and loaded
        no plugin. The target calls ``enter(*place)`` first.
        """
        place = ([str(each) for each in self.path], str(self.folder), environment)
        with self.server().start(target, given, *place, timeout_s=timeout_s) as child:
            return child.result(timeout_s)

    def evaluate(self, code: str, **environment: str) -> Any:
        """The value that ``code`` assigns to ``answer``. It may use ``registry``."""
        return json.loads(self.forked(f"{__file__}:answer", textwrap.dedent(code), environment))

    def plugin(self, name: str, **environment: str) -> dict[str, Any]:
        """The plugin with this name, from the registry of a child process."""
        (found,) = self.evaluate(
            f"""
            answer = [
                dict(version=p.version, status=p.status, reason=p.reason, api=p.api,
                     offers=[s.name for s in p.specs])
                for p in registry.plugins if p.name == {name!r}
            ]
            """,
            **environment,
        )
        return dict(found)


def enter(path: Sequence[str], folder: str, environment: dict[str, str]) -> None:
    """Set up the path and environment as in a new process with these packages installed."""
    for name in [name for name in os.environ if name.startswith("KVPLUG_")]:
        del os.environ[name]
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[1:1] = path
    importlib.invalidate_caches()


HEADER = """
import logging
from kvplug import *
from kvplug.engine import *
from kvplug.transport import *
from kvplug.config.options import check_options
from kvplug.transport.spec import Kind
logging.basicConfig()
registry = Registry.from_env()
"""


def answer(parent: Parent, code: str, *place: Any) -> str:
    """In a child: run the code of :meth:`Site.evaluate`."""
    enter(*place)
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(HEADER + code, scope)  # noqa: S102 - the code is the test's own
    return json.dumps(scope["answer"])


def run_program(parent: Parent, arguments: list[str], *place: Any) -> tuple[int, str, str]:
    """In a child: run the program ``kvplug``. Returns its exit code, its stdout and its stderr."""
    enter(*place)
    sys.argv = ["kvplug", *arguments]
    files = [io.BytesIO(), io.BytesIO()]
    out, err = (io.TextIOWrapper(file, encoding="utf-8", write_through=True) for file in files)
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        from kvplug.cli.main import main

        try:
            main()
        except SystemExit as e:
            code = int(e.code or 0)
        except BaseException:
            traceback.print_exc()
            code = 1
    stdout, stderr = (file.getvalue().decode() for file in files)
    return code, stdout, stderr
