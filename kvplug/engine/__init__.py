"""For authors of connectors and of adapters to engines."""
