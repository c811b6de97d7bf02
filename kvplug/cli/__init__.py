"""The program ``kvplug``: its own commands, and those that plugins bring."""
