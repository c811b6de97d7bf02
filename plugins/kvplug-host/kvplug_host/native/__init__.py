"""The compiled copies between slots and caches (pages.c). They are optional: Python does the same, slower."""
