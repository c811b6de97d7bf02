"""A GPU's libraries without a GPU: plugins that bind NCCL or the CUDA runtime are tested over them.

:mod:`~kvplug_testing.gpu.fake` compiles the libraries from C, and controls their faults and streams.
:mod:`~kvplug_testing.gpu.host` makes CPU memory a device whose streams are theirs, which
:mod:`~kvplug_testing.gpu.pynccl` and :mod:`~kvplug_testing.gpu.cuda_ipc` complete for the two plugins.
"""
