"""For authors of transports."""
