"""Lets the asserts of the contract, which stand in modules of their own, say what they compared."""

from __future__ import annotations

import pytest

for module in ("creating", "listing", "reading", "record_contract"):
    pytest.register_assert_rewrite(f"tests.contract.{module}")
