"""Negotiation between two ends: the handshake, the choice of a transport, the facts about a model."""
