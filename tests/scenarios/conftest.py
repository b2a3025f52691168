"""Asserts of the modules that carry out scenarios show the values that they compare."""

from __future__ import annotations

import pytest

MODULES = ("acts", "jobs", "objects", "playing", "serving", "stage")
QUORUM = ("quorum.acts", "quorum.openings", "quorum.stage")
pytest.register_assert_rewrite(*(f"tests.scenarios.{name}" for name in (*MODULES, *QUORUM)))
