"""The pipe "cuda-ipc"."""
