"""Moves pages between a store in host memory and a cache on a device."""
