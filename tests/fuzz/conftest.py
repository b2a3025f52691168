"""`make test` fuzzes the same examples every time; `make soak` draws new ones.

A property takes as long as it takes: a busy machine is no counterexample.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "fuzz",
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("fuzz")
