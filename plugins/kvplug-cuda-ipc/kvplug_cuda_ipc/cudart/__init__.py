"""The CUDA runtime by ctypes: as much of it as it takes to share memory and to copy."""
