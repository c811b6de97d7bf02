"""Copies between rows of pages and the caller's memory, with the checksums, compiled where possible."""
