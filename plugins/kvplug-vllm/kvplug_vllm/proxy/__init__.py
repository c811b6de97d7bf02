"""A small proxy for demos: sends every prompt first to a prefill server, then to a decode server.

    python -m kvplug_vllm.proxy --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

It needs aiohttp, which vLLM requires as well. A prefill server that is down, fails or is slow does not fail a
request: the decode server then computes the prompt itself. See ``docs/how-to/run-under-vllm.md``.
"""
