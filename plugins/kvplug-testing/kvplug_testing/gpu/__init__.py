"""Fakes of a GPU's libraries, to test plugins that bind NCCL or the CUDA runtime without a GPU.

:mod:`~kvplug_testing.gpu.fake` compiles the libraries from C, and controls their faults and streams.
:mod:`~kvplug_testing.gpu.host` makes CPU memory a device with the fake's streams;
:mod:`~kvplug_testing.gpu.pynccl` and :mod:`~kvplug_testing.gpu.cuda_ipc` complete it for the two plugins.
"""
