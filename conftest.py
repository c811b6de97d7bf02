"""For all tests, the core's and the plugins'."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How long an example takes depends on what else the machine does; a test of speed measures that itself.
settings.register_profile("kvplug", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvplug")
