"""Compiles a file of C into the wheel, where there is a compiler; else the wheel is made without it.

Which file, and what the library is called, is said by ``source`` and ``library`` in the table
``tool.hatch.build.hooks.custom`` of pyproject.toml. ``HATCH_BUILD_NO_HOOKS=true`` leaves it out. ``CC`` names
another compiler than ``cc``. Each package with compiled code has a copy of this file.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ("-std=c11", "-O2", "-fPIC", "-shared", "-fno-strict-aliasing")


class CompiledSteps(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or not sys.platform.startswith("linux"):
            return
        if version == "editable":
            self._compile(Path(self.root, self.config["library"]))  # is imported from where it lies
            return
        self._folder = tempfile.TemporaryDirectory()
        library = Path(self._folder.name, "library.so")
        if self._compile(library):
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"
            build_data["force_include"][str(library)] = self.config["library"]

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        folder = getattr(self, "_folder", None)
        if folder is not None:
            folder.cleanup()

    def _compile(self, library: Path) -> bool:
        source = Path(self.root, self.config["source"])
        built_from = f"-DSOURCE_CRC32={zlib.crc32(source.read_bytes())}u"
        try:
            compiler = shlex.split(os.environ.get("CC") or "cc")
            command = [*compiler, *FLAGS, built_from, "-o", str(library), str(source)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except (OSError, ValueError) as e:
            why = str(e)
        else:
            if done.returncode == 0:
                return True
            why = done.stderr.strip()
        self.app.display_warning(f"{source.name} is not compiled: {why}")
        with contextlib.suppress(OSError):
            library.unlink()
        return False
