"""Configuration: Config, read from all its sources, and the options classes of plugins."""
