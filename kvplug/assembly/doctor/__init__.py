"""``kvplug doctor``: what an engine with this config would meet here and at a peer, really tried."""
