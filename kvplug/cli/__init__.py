"""The program ``kvplug``, with its own commands and those of plugins."""
