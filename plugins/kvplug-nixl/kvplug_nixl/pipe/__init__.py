"""The pipe "nixl"."""
