"""Metrics: what was moved, how fast, and what failed for which reason."""
