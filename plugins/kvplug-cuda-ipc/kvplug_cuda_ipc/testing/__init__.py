"""What tests without a GPU need: a CUDA runtime of our own."""
