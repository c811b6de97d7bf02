"""The part of the CUDA runtime that shares memory between processes and copies, bound with ctypes."""
