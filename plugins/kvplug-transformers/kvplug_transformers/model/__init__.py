"""Models: where they come from, and what must be known about one to move its KV cache."""
