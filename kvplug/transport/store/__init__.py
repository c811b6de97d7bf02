"""Stores: pages of KV under content keys, kept in memory, on disk or elsewhere."""
