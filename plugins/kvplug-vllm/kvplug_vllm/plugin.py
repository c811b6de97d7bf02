"""What vLLM's plugin entry point calls, in each of its processes: the name becomes known, no more."""

from __future__ import annotations

import contextlib

NAME = "KvplugConnector"
"""Of the class, and what ``kv_connector`` says."""

MODULE = "kvplug_vllm.connector"


def register() -> None:
    """Make ``"kv_connector": "KvplugConnector"`` work. May be called again.

    The class is also found by ``kv_connector_module_path`` alone, where vLLM loads no plugins (see its
    ``VLLM_PLUGINS``). But it looks the class of a child of its MultiConnector up by name, and a name that is
    not registered ends its engine; so the class's own module calls this as well.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # the name is known
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
