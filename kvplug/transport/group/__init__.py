"""Groups of ranks that need no global process group."""
