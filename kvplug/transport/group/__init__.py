"""Ranks that found each other without a global process group."""
