"""Plugins for tests: real packages with real metadata, in a folder that only child processes import from."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvplug_testing.forkserver import ForkServer
from kvplug_testing.peers import Parent


class Site:
    """A folder of installed packages, and processes with this folder on their path."""

    def __init__(self, folder: Path, server: Callable[[], ForkServer]) -> None:
        self.folder = folder
        self._server = server
        self.marks = folder / "marks"
        self.marks.mkdir(parents=True)
        self.path = [folder / "site"]

    def add(
        self,
        name: str,
        source: str,
        *,
        distribution: str = "",
        version: str = "1.0",
        module: str = "",
        entry_point: str = "",
        where: str = "site",
        files: dict[str, str] | None = None,
        readme: str = "",
    ) -> Path:
        """Install a package whose entry point ``name`` is ``<module>.plugin``.

        Importing the package, or its entry-point module, is recorded; see :meth:`marked`.
        """
        distribution = distribution or f"kvplug-{name}"
        module = module or distribution.replace("-", "_")
        site = self.folder / where
        package = site / module
        package.mkdir(parents=True, exist_ok=True)
        mark = f"open({str(self.marks)!r} + '/' + __name__, 'w').close()\n"
        (package / "__init__.py").write_text(mark)
        (package / "plugin.py").write_text(mark + source)
        for file, content in (files or {}).items():
            (package / file).write_text(textwrap.dedent(content))
        line = f"{name} = {entry_point or f'{module}.plugin'}"
        self.add_metadata(distribution, version, line, where=where, readme=readme)
        return package

    def add_metadata(
        self, distribution: str, version: str, *entry_points: str, where: str = "site", readme: str = ""
    ) -> Path:
        """Add a dist-info folder with only these entry points and this readme."""
        info = self.folder / where / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n\n{readme}"
        )
        (info / "entry_points.txt").write_text("[kvplug]\n" + "".join(f"{each}\n" for each in entry_points))
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

    def ask(self, code: str, **environment: str) -> Any:
        """The value that ``code`` assigns to ``answer``. It may use ``registry``.

        It runs in a fork of a process that has imported kvplug and loaded no plugin.
        """
        program = "\n".join(
            [
                "import json, sys, logging; logging.basicConfig()",
                "from kvplug import *",
                "from kvplug.engine import *",
                "from kvplug.transport import *",
                "registry = Registry.from_env()",
                textwrap.dedent(code),
            ]
        )
        path = [str(each) for each in self.path]
        with self._server().start(
            f"{__file__}:answer", program, path, str(self.folder), environment
        ) as child:
            return json.loads(child.result(60.0))

    def plugin(self, name: str, **environment: str) -> dict[str, Any]:
        """The plugin with this name, from the registry of a child process."""
        every = self.ask(
            """
            answer = [
                dict(name=p.name, distribution=p.distribution, version=p.version, status=p.status,
                     reason=p.reason, api=p.api, offers=[s.name for s in p.specs])
                for p in registry.plugins
            ]
            """,
            **environment,
        )
        found = [each for each in every if each["name"] == name]
        assert len(found) == 1, f"{len(found)} plugins named {name!r}"
        plugin: dict[str, Any] = found[0]
        return plugin


def answer(parent: Parent, program: str, path: list[str], folder: str, environment: dict[str, str]) -> str:
    """In a child: set up the path and environment as in a new process, and run the program."""
    for name in [name for name in os.environ if name.startswith("KVPLUG_")]:
        del os.environ[name]
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[1:1] = path
    importlib.invalidate_caches()
    file = Path(folder, "program.py")
    file.write_text(program)
    return json.dumps(runpy.run_path(str(file))["answer"])
