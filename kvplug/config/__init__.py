"""Configuration: a Config from every source, and the options classes of plugins."""
