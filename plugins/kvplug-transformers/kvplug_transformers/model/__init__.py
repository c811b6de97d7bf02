"""Models: finding, converting, loading and describing them for a transfer of their KV cache."""
