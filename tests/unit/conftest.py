"""Settings of the property tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# What an example takes, or making it, says how busy the machine is and nothing about the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
