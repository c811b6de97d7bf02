"""Compiles kvplug_host/native/pages.c into the wheel, where there is a compiler; else it is pure Python.

``HATCH_BUILD_NO_HOOKS=true`` leaves it out. ``CC`` names another compiler than ``cc``.
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

SOURCE = "kvplug_host/native/pages.c"
TARGET = "kvplug_host/native/_pages.so"
FLAGS = ("-std=c11", "-O2", "-fPIC", "-shared", "-fno-strict-aliasing")


class CompiledSteps(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or not sys.platform.startswith("linux"):
            return
        if version == "editable":
            self._compile(Path(self.root, TARGET))  # is imported from where it lies
            return
        self._folder = tempfile.TemporaryDirectory()
        library = Path(self._folder.name, "_pages.so")
        if self._compile(library):
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"
            build_data["force_include"][str(library)] = TARGET

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        folder = getattr(self, "_folder", None)
        if folder is not None:
            folder.cleanup()

    def _compile(self, library: Path) -> bool:
        source = Path(self.root, SOURCE)
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
        self.app.display_warning(f"{SOURCE} is not compiled, and Python does without it: {why}")
        with contextlib.suppress(OSError):
            library.unlink()
        return False
