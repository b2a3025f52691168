"""Asserts of the modules that carry out scenarios show the values that they compare."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "tests.scenarios.quorum.acts",
    "tests.scenarios.quorum.openings",
    "tests.scenarios.quorum.stage",
)
