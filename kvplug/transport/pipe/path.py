"""What a pipe says of its own speed."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class PathReport:
    """What a transport knows of the path of one pipe. Rates are in 10^9 bytes per second."""

    measured_gb_per_s: float | None = None
    """What it measured itself when the pipe began; ``None``: nothing."""
    expected_gb_per_s: float | None = None
    """What the path should carry, where that is better known than by the spec's ``Cost``: by an option, for
    example. ``0``: nothing is expected. ``None``: what the ``Cost`` claims."""
    reason: str = ""
    """Why the path may be slow, as far as the transport sees, and what to change; empty: it sees nothing."""
