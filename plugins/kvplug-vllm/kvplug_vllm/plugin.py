"""The function of vLLM's plugin entry point, which vLLM calls in each of its processes."""

from __future__ import annotations

import contextlib

NAME = "KvplugConnector"
"""The name of the class, and the value of ``kv_connector``."""

MODULE = "kvplug_vllm.connector"


def register() -> None:
    """Make ``"kv_connector": "KvplugConnector"`` work. May be called several times.

    Without plugins (see vLLM's ``VLLM_PLUGINS``), vLLM finds the class by ``kv_connector_module_path``. But
    it looks up the children of a MultiConnector by name, and an unregistered name ends its engine. Therefore
    the module of the class also calls this function.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # the name is registered already
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
