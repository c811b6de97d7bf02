"""Groups of ranks that work without a global process group."""
