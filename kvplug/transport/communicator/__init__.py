"""The device communicator: the ABC, and the comparison of calls before each collective."""

from kvplug.transport.communicator.communicator import DeviceCommunicator

__all__ = ["DeviceCommunicator"]
