"""The device communicator: the ABC, and what its ranks tell each other before each collective."""

from kvplug.communicator.communicator import DeviceCommunicator

__all__ = ["DeviceCommunicator"]
