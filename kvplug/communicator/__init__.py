"""The device communicator: the ABC, and what its ranks tell each other before each collective."""

from kvplug.communicator.all2all import All2AllManager
from kvplug.communicator.communicator import DeviceCommunicator
from kvplug.communicator.point_to_point import RecvOp, SendOp
from kvplug.communicator.tokens import TokenSplit

__all__ = ["All2AllManager", "DeviceCommunicator", "RecvOp", "SendOp", "TokenSplit"]
