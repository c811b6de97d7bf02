"""``kvplug doctor``: tries what an engine with this config would do on this host and with a peer."""
