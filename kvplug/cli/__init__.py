"""The program ``kvplug``: its own commands, and those of plugins."""
