"""A property takes as long as it takes: a busy machine is no counterexample."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
