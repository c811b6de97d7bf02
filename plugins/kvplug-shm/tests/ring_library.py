"""Libraries that are built from ring.c in another way: from changed source, or with other flags."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from kvplug_shm.native import library

SOURCE = Path(library.__file__).with_name("ring.c")
FLAGS = ("-std=c11", "-O2", "-fPIC", "-shared", "-fno-strict-aliasing")
"""As in hatch_build.py."""

Change: TypeAlias = tuple[str, str]
"""A text of ring.c that occurs once, and what takes its place."""


def compiler() -> str | None:
    """The C compiler; ``None``: there is none."""
    return shutil.which("gcc") or shutil.which("cc")


def changed(*changes: Change) -> str:
    """The text of ring.c with these changes."""
    text = SOURCE.read_text(encoding="utf-8")
    for old, new in changes:
        assert text.count(old) == 1, f"ring.c has {text.count(old)} times {old!r}"
        text = text.replace(old, new)
    return text


def build(folder: Path, *changes: Change, flags: Sequence[str] = ()) -> Path:
    """Write ring.c with these changes to ``folder`` and compile it. Returns the library, ``_ring.so``."""
    source, made = folder / "ring.c", folder / "_ring.so"
    source.write_text(changed(*changes), encoding="utf-8")
    command = [compiler() or "cc", *FLAGS, *flags, f"-DSOURCE_CRC32={zlib.crc32(source.read_bytes())}u"]
    subprocess.run([*command, "-o", str(made), str(source)], check=True, timeout=120)
    return made


@functools.cache
def explored(*changes: Change, has_fence: bool = True) -> ctypes.CDLL:
    """The steps of ring.c for the explorer (ring_explored.c), with these changes, and with or without an
    announcement's fence.
    """
    with tempfile.TemporaryDirectory() as folder:
        made, ring = Path(folder, "explored.so"), Path(folder, "ring.c")
        ring.write_text(changed(*changes), encoding="utf-8")
        defined = [
            f'-DRING_C="{ring}"',
            '-DRING_MEMORY="/dev/null"',
            *([] if has_fence else ["-DNO_FENCE"]),
        ]
        source = Path(__file__).with_name("ring_explored.c")
        # Optimizing more takes longer than it saves.
        command = [compiler() or "cc", *FLAGS, "-O1", *defined, "-o", str(made), str(source)]
        subprocess.run(command, check=True, timeout=120)
        library = ctypes.CDLL(str(made))
    library.explored.restype = ctypes.c_int64
    library.explored.argtypes = (
        ctypes.c_int,
        ctypes.c_void_p,
        *[ctypes.c_int64] * 2,
        ctypes.c_void_p,
        ctypes.c_int64,
    )
    return library
