"""For kvplug's own tests, and never published.

- :mod:`~kvplug_lab.gpu`: a ``libnccl`` and a ``libcudart`` without a GPU, and CPU memory as a device
- :mod:`~kvplug_lab.faults`: a pipe that injects faults
- :mod:`~kvplug_lab.around`: transports that wrap another one and change nothing
"""
