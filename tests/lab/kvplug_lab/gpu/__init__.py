"""Fakes of a GPU's libraries, to test plugins that bind NCCL or the CUDA runtime without a GPU.

:mod:`~kvplug_lab.gpu.fake` compiles the libraries from C, and controls their faults and streams.
:mod:`~kvplug_lab.gpu.host` makes CPU memory a device with the fake's streams;
:mod:`~kvplug_lab.gpu.pynccl` and :mod:`~kvplug_lab.gpu.cuda_ipc` complete it for the two plugins.
"""
