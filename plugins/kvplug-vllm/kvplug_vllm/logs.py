"""kvplug's log lines among vLLM's, in the same form."""

from __future__ import annotations

import logging

from kvplug import Registry
from kvplug.engine import CommandSpec

_VLLM = "vllm"


def join_vllm(registry: Registry) -> None:
    """Let kvplug and every plugin of it log through vLLM's handlers, at its level.

    Python shows warnings of a logger that nobody set up on stderr, bare, and nothing below. A logger that
    somebody has set up is left alone; so are all where vLLM was told to leave logging alone.
    """
    theirs = logging.getLogger(_VLLM)
    targets = (spec.target if isinstance(spec, CommandSpec) else spec.factory for _, spec in registry)
    packages = (target.partition(":")[0].partition(".")[0] for target in targets)
    for name in sorted({"kvplug", "kvplug_vllm", *packages}):
        logger = logging.getLogger(name)
        if theirs.handlers and not logger.handlers and logger.level == logging.NOTSET:
            logger.handlers = list(theirs.handlers)
            logger.setLevel(theirs.level)
            logger.propagate = False
