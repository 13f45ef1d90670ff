from __future__ import annotations

from hypothesis import HealthCheck, settings

# On a busy machine an example may stand still for seconds; that is no failure.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
