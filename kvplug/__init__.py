"""kvplug: the socket between LLM engines and KV cache transports."""

__version__ = "0.1.0"
