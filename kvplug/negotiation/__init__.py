"""What two ends agree on: handshake, selection of a transport, the facts of a model."""
