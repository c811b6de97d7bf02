"""What vLLM's plugin entry point calls, in each of its processes: the name becomes known, no more."""

from __future__ import annotations

NAME = "KvplugConnector"
"""Of the class, and what ``kv_connector`` says."""

MODULE = "kvplug_vllm.connector"


def register() -> None:
    """Make ``"kv_connector": "KvplugConnector"`` work. May be called again.

    Without it the class is found by ``kv_connector_module_path`` alone; but vLLM looks the class of a
    child of its MultiConnector up by name, so a name that is not registered ends its engine.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.get_connector_class_by_name(NAME)
    except ValueError:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
