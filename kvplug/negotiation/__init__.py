"""Negotiation between two ends: the handshake, the selection of a transport, the facts of a model."""
