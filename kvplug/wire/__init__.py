"""Bytes to things and back, bounded and without running anything that came in.

Three modules: :mod:`~kvplug.wire.frames` (the 16-byte header before every message),
:mod:`~kvplug.wire.values` (a closed list of plain values), :mod:`~kvplug.wire.tensors` (what a tensor's
bytes mean, and those bytes without a copy). The formats are written down in ``docs/reference/wire.md``.
"""
